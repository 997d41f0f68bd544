"""Fields of other servers that this one does not have, and the values with which they change nothing.

Clients send many of them with every request. A value that would change the answer is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgemoe.serve.errors import ApiError

Neutral = Mapping[str, tuple[object, ...]]
"""Field -> the values with which it changes nothing, the usual one first. Null and what is empty never change
anything."""

_OFF: tuple[object, ...] = (0, False)

SAMPLERS: Neutral = {
    **dict.fromkeys(("mirostat", "mirostat_mode", "dynatemp_range", "smoothing_factor", "top_a"), _OFF),
    **dict.fromkeys(("xtc_probability", "dry_multiplier", "penalty_alpha", "no_repeat_ngram_size"), _OFF),
    **dict.fromkeys(("top_n_sigma", "epsilon_cutoff", "eta_cutoff", "adaptive_target"), (*_OFF, -1)),
    **dict.fromkeys(("typical_p", "typical", "typ_p", "tfs_z", "tfs", "length_penalty"), (1,)),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("use_beam_search", "early_stopping", "dynamic_temperature", "ban_eos_token"), (False,)),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "logits_processors", "custom_logit_processor"), ()),
}
"""Ways to choose tokens that llama.cpp, ollama, vLLM and others have."""

WITHOUT_PENALTY = "repeat_last_n"
"""The number of tokens that a repetition penalty takes into account. Here these are all of them (-1)."""

_EMPTY: tuple[object, ...] = (None, "", [], {})


def require_neutral(fields: Mapping[str, Any], neutral: Neutral, *, field: str | None = None) -> None:
    """Refuses fields that would change the answer in a way that this server does not have.

    Args:
        fields: fields of an object of the body, and their values.
        neutral: the values that change nothing.
        field: the field that holds the object; None: it is the body.

    Raises:
        ApiError: naming the field.
    """
    for name, allowed in neutral.items():
        value = fields.get(name)
        if value in _EMPTY or value in allowed:
            continue
        shown = f"{field}.{name}" if field else name
        wanted = f"{shown} {allowed[0]}" if allowed else f"no {shown}"
        message = f"expected {wanted}, got {repr(value)[:60]}: this server cannot obey it, so leave it out"
        raise ApiError(400, message, param=field or name, code="unsupported_parameter")


def penalised_tokens(last: int | None, penalty: float | None) -> Neutral:
    """The neutral values of WITHOUT_PENALTY: any without a repetition penalty, else all tokens."""
    return {WITHOUT_PENALTY: (-1,) if penalty not in (None, 1) else (-1, last)}
