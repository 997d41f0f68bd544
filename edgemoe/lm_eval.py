"""edgemoe as a model of lm-eval, which installs by itself: `pip install lm-eval`.

    python -m edgemoe.lm_eval --model edgemoe --model_args pretrained=DIR,vram_limit=3GB --tasks hellaswag

The arguments are lm-eval's own, and `model_args` the arguments of `edgemoe.load`. A program imports this module, and
then calls `lm_eval.simple_evaluate(model="edgemoe", ...)`. The choices of one question compute its context once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lm_eval.models  # noqa: F401  # registers lm-eval's own models, which a registration alone would hide
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

import edgemoe
from edgemoe.api.choices import Choices
from edgemoe.api.model import Model
from edgemoe.api.template import render_chat
from edgemoe.errors import UserError

NEW_TOKENS = 256
"""Most new tokens of an answer where a task names no number."""

Encoded = tuple[Any, list[int], list[int]]
"""A key, and the token ids of a context and of its continuation."""

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")


@register_model("edgemoe")
class EdgemoeLM(TemplateLM):  # type: ignore[misc]  # lm-eval ships no types
    """A model under limits, with lm-eval's interface.

    Args:
        pretrained: a model that `edgemoe.load` takes; None: the demo model.
        model: one that is open, instead.
        batch_size, max_batch_size, device: ignored; requests run together, as `parallel` allows.
        settings: keywords of `edgemoe.load`.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        model: Model | None = None,
        batch_size: object = None,
        max_batch_size: object = None,
        device: object = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if isinstance(settings.get("levels"), int):  # lm-eval reads levels=4 as a number
            settings["levels"] = str(settings["levels"])
        self._model = model or edgemoe.load(pretrained, **settings)
        self.tokenizer = self._model.tokenizer

    @property
    def max_length(self) -> int:
        """Tokens of the context."""
        return self._model.engine.plan.context

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, for lm-eval's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """Token ids of a text, by default with the special tokens that the tokenizer adds."""
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens is not False)["input_ids"])

    def apply_chat_template(
        self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation, up to the begin of the next answer.

        Raises:
            UserError: an answer is to be continued.
        """
        if not add_generation_prompt:
            raise UserError(
                "a conversation that ends with a question", "an answer to be continued", "leave it out"
            )
        return render_chat(self.tokenizer, chat_history)

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the greedy one."""
        encoded = [self._fitting(context, continuation) for _, context, continuation in requests]
        # Neighbours share the longest prefixes, whose KV is kept.
        order = sorted(range(len(encoded)), key=lambda i: encoded[i])
        found: dict[int, tuple[float, bool]] = {}
        for i in order:
            tokens, first = encoded[i]
            (scores,) = self._model.logprobs([tokens], top=1, first=[first])
            greedy = all(score.logprob == score.top[0][1] for score in scores)
            found[i] = math.fsum(score.logprob for score in scores), greedy
            self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
        return [found[i] for i in range(len(encoded))]

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], int]:
        """Context and continuation, cut at the left to the context's tokens, and the continuation's first place."""
        tokens = [*context, *continuation][-self.max_length :]
        return tokens, max(len(tokens) - len(continuation), 1)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the context that score each token once."""
        return [self._rolling(request.args[0]) for request in requests]

    def _rolling(self, text: str) -> float:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length - 1,
            context_len=1,
        )
        encoded = [(None, *make_disjoint_window(window)) for window in windows]
        scores = [self._score(context, continuation) for _, context, continuation in encoded]
        return math.fsum(scores)

    def _score(self, context: list[int], continuation: list[int]) -> float:
        tokens, first = self._fitting(context, continuation)
        (scores,) = self._model.logprobs([tokens], first=[first])
        return math.fsum(score.logprob for score in scores)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, which run together."""
        futures = []
        for request in requests:
            context, given = request.args
            choices = _choices(dict(given))
            most = choices.setdefault("max_new_tokens", NEW_TOKENS)
            # A long prompt loses its begin, as in lm-eval's own models, but never more than half of the context.
            room = max(self.max_length - most, self.max_length // 2)
            futures.append(self._model.submit(self.tok_encode(context)[-room:], **choices))
        answers = [future.result().text for future in futures]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers


def _choices(arguments: dict[str, Any]) -> Choices:
    """A task's settings of an answer; without do_sample the likeliest token comes."""
    until = arguments.get("until") or []
    choices = Choices(stop=[until] if isinstance(until, str) else list(until))
    most = arguments.get("max_gen_toks") or arguments.get("max_new_tokens")
    if most:
        choices["max_new_tokens"] = int(most)
    for name in _SAMPLING:
        if arguments.get(name) is not None:
            choices[name] = arguments[name]  # type: ignore[literal-required]
    if not arguments.get("do_sample"):
        choices["temperature"] = 0.0
    return choices


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
