"""Every folder of transformers that has experts: a small model of it runs as transformers runs it, or is refused.

A folder that does neither fails, so that a new version of transformers is looked at family by family. `make test`
leaves these tests out: `make test-folders` runs them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_models import VOCABULARY
from folder_models import folder_config, folder_model, load_folder_model, save_folder_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from edgemoe.engine.engine import Engine
from edgemoe.errors import ModelRefused
from edgemoe.families.table import REFUSED, TEXT_HALVES, family_of, traits_of
from edgemoe.families.traits import TRAITS
from edgemoe.kv import blocks
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.storage.convert.config import bounded_config

pytestmark = [pytest.mark.e2e, pytest.mark.folders, pytest.mark.filterwarnings("ignore")]

PROMPT, NEW = 40, 12
CONTEXT = 64

MEDIAN_KL = 0.0005
"""Nats; qwen3_moe has 0.0003. Single tokens differ more, where two experts are so close that rounding chooses."""

QUANTIZED_KL = 0.004
"""With keys and values as q8_0."""


def folders() -> dict[str, list[str]]:
    """Folders of transformers whose modeling code uses the experts interface -> the model types of their configs."""
    found = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        if "use_experts_implementation" in path.read_text(encoding="utf-8"):
            configs = path.parent.glob("configuration_*.py")
            text = "".join(each.read_text(encoding="utf-8") for each in configs)
            found[path.parent.name] = re.findall(r'model_type = "([^"]+)"', text)
    return found


def test_every_folder_runs_or_is_refused_by_a_reason():
    """One of a folder's model types is in the table, or is refused by a sentence of its own."""
    silent = [
        folder
        for folder, types in folders().items()
        if not any(name in TRAITS or name in REFUSED for name in types)
    ]
    assert silent == []
    for name, reason in REFUSED.items():
        with pytest.raises(ModelRefused, match=re.escape(f"model_type '{name}'; {reason}")):
            traits_of(name)


CAUSAL = [name for name in TRAITS if CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING]
"""Families with a causal model of their own; others are the language model of a multimodal one."""


def kl(want: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Divergence of each row of softmax(got) from softmax(want), nats."""
    p, q = want.double().log_softmax(-1), logits.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def fresh(engine: Engine) -> SequenceKV:
    """A sequence in addition to the ones that the engine's limit includes."""
    return SequenceKV(engine.shape.kv, CONTEXT)


def decoded(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Logits of a prompt in one step, and of each new token in a step of its own."""
    sequence = fresh(engine)
    parts = [engine.all_logits(sequence, tokens[:PROMPT], decode=False)]
    return torch.cat(parts + [engine.step(Step((Segment(sequence, (k,)),))) for k in tokens[PROMPT:]])


def continued(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Logits of a prompt in steps of 13 tokens and of the rest."""
    sequence = fresh(engine)
    parts = tokens[:13], tokens[13:]
    return torch.cat([engine.all_logits(sequence, part, decode=False) for part in parts])


def after_a_kept_prefix(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Logits of tokens after a copied prefix, or one whose bytes were written out and read again, and of all before."""
    kept, sequence = fresh(engine), fresh(engine)
    first = engine.all_logits(kept, tokens[:PROMPT], decode=False)
    if kept.states:
        assert sequence.copy_prefix(kept, PROMPT) == PROMPT
    else:
        for windowed in (False, True):
            into, stored = (each.rows(0, PROMPT, windowed=windowed).views for each in (sequence, kept))
            for to, row in zip(into, stored, strict=True):
                to[:] = bytes(row)
        sequence.restore(range(PROMPT), windowed=True)
    return torch.cat((first, engine.all_logits(sequence, tokens[PROMPT:], decode=False)))


def in_a_batch(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Logits of the first of three sequences that share their steps."""
    sequences = [fresh(engine) for _ in range(3)]
    for sequence, length in zip(sequences[1:], (5, 17), strict=True):
        engine.all_logits(sequence, tokens[3 : 3 + length], decode=False)
    first = engine.all_logits(sequences[0], tokens[:PROMPT], decode=False)
    steps = [
        engine.step(Step(tuple(Segment(sequence, (token,)) for sequence in sequences)))[:1]
        for token in tokens[PROMPT:]
    ]
    return torch.cat((first, *steps))


def in_row_blocks(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Logits of a prompt whose parts of layers take 16 rows at a time, as in a long prompt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_ROWS", 16)
        return engine.all_logits(fresh(engine), tokens, decode=False)


WAYS: list[Callable[[Engine, list[int]], torch.Tensor]] = [
    *(decoded, continued, in_row_blocks),
    *(after_a_kept_prefix, in_a_batch),
]


def reference(model: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' logits, float32 [tokens, vocabulary], from one pass over all tokens."""
    with torch.no_grad():
        found = model(input_ids=torch.tensor([tokens]))
    return found.logits[0].float()


def without_experts(model: Any, tokens: list[int]) -> torch.Tensor:
    """`reference` with zeros as the experts' weights."""
    experts = [module for module in model.modules() if hasattr(module, "_apply_gate")]
    with torch.no_grad():
        for weight in (weight for module in experts for weight in module.parameters(recurse=False)):
            weight.zero_()
    return reference(model, tokens)


def covered(model_type: str) -> Any:
    """A model type, as a test of the row of docs/models.md that it proves."""
    return pytest.param(model_type, marks=pytest.mark.covers(TEXT_HALVES.get(model_type, model_type)))


RUNS = [covered(name) for name in (*TRAITS, *TEXT_HALVES) if name in TEXT_HALVES or name in CAUSAL]


SEEDS = {"gemma4_text": 5}
"""model_type -> the seed of its tokens, where with seed 1 an early token's experts differ by rounding. Every later
token sees that one: the median shows it, and transformers' bf16 differs from its float32 there as well."""


@pytest.mark.parametrize("model_type", RUNS)
def test_a_family_runs_as_transformers_runs_it(open_engine, tmp_path, model_type):
    """Converted and streamed with 6 experts in memory and look-ahead, in every way, and with quantized KV."""
    source = save_folder_model(folder_model(model_type), tmp_path / "model")
    store = tmp_path / "store"
    convert_checkpoint(source, store, max_level=8, layout="auto", dense_bits=16)
    generator = torch.Generator().manual_seed(SEEDS.get(model_type, 1))
    tokens = torch.randint(3, VOCABULARY, (PROMPT + NEW,), generator=generator).tolist()
    model = load_folder_model(model_type, source)
    want = reference(model, tokens)
    assert float(kl(want, without_experts(model, tokens)).mean()) > 40 * MEDIAN_KL
    parallel = 1 if model_type == "phimoe" else 3
    engine = open_engine(store, experts=6, context=CONTEXT, parallel=parallel, speculate="full")
    found = {way.__name__: kl(want, way(engine, tokens)) for way in WAYS if parallel > 1 or way != in_a_batch}
    quantized = open_engine(store, experts=6, context=CONTEXT, kv="q8_0")
    found["quantized"] = kl(want, decoded(quantized, tokens))
    medians = {name: float(rows.median()) for name, rows in found.items()}
    assert medians.pop("quantized") < QUANTIZED_KL
    assert max(medians.values()) < MEDIAN_KL, medians


@pytest.mark.parametrize("model_type", RUNS)
def test_a_store_of_a_family_is_derived_from_its_config_alone(model_type):
    """The sizes are the ones that the config was made with."""
    family = family_of(bounded_config(folder_config(model_type).to_dict()))
    assert (family.experts, family.hidden, family.top_k) == (8, 64, 2)
    assert family.intermediate in (32, 96)
