"""GGUF files of small models of each family run as transformers runs the model, and as llama.cpp runs the file.

`make test-folders` runs these tests. llama.cpp's part needs the package xllamacpp, which has it built:
`pip install xllamacpp`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import VOCABULARY
from gguf_converter import NAMES
from gguf_files import Kind
from gguf_models import covered, small_model, write_small

from edgemoe.engine.engine import Engine
from edgemoe.kv.sequence import SequenceKV
from edgemoe.models.conversion.run import convert_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.folders, pytest.mark.filterwarnings("ignore")]

LENGTH, CONTEXT = 32, 64

MEDIAN_KL = 0.0005
"""Nats. Single tokens differ more, where two experts are so close that rounding chooses."""

LLAMA_KL = 0.00001

OTHERWISE = {"phimoe": "its norms have no mean and its router no mask there"}
"""model_type -> what llama.cpp computes otherwise than transformers."""

LLAMA_CPP = """
import json, os, sys
import xllamacpp

path, prompts = sys.argv[1], json.loads(sys.argv[2])
parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.n_ctx, parameters.n_parallel = path, 256, 1
parameters.warmup = parameters.fit_params = parameters.use_jinja = False
parameters.no_mmproj, parameters.verbosity = True, 0
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server, out = xllamacpp.Server(parameters), []
for prompt in prompts:
    request = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 300, "ignore_eos": True}
    answer = server.handle_completions(request | {"cache_prompt": False})
    answer = answer if isinstance(answer, dict) else json.loads(answer)
    # A token that is no whole character has none.
    content = (answer["choices"][0].get("logprobs") or {}).get("content")
    out.append([(each["id"], each["logprob"]) for each in content[0]["top_logprobs"]] if content else None)
print("\\n" + json.dumps(out), flush=True)
os._exit(0)
"""
"""Prints the logarithms of the likelihoods of all tokens after each prompt, or null."""


def kl(want: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Divergence of each row of softmax(got) from softmax(want), nats."""
    p, q = want.double().log_softmax(-1), logits.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def reference(model: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' logits, float32 [tokens, vocabulary]."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0].float()


def some_tokens() -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCABULARY, (LENGTH,), generator=generator).tolist()


def in_bf16(model: Any) -> Any:
    """The model with all weights in bf16, except the ones that transformers keeps in float32."""
    precise = tuple(model._keep_in_fp32_modules_strict or ())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and "inv_freq" not in name and not any(p in name for p in precise):
            tensor.data = tensor.data.to(torch.bfloat16)
    return model


def logits_of(engine: Engine, tokens: list[int]) -> torch.Tensor:
    return engine.all_logits(SequenceKV(engine.shape.kv, CONTEXT), tokens, decode=False)


@pytest.mark.parametrize("model_type", covered(NAMES))
def test_a_file_runs_as_transformers_runs_the_model(open_engine, tmp_path: Path, model_type):
    """Converted and streamed with six experts in memory."""
    model = in_bf16(small_model(model_type))
    file = write_small(
        model, tmp_path / "model.gguf", experts=lambda name, weight: (weight.numpy(), Kind.F32)
    )
    convert_checkpoint(file, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    engine = open_engine(tmp_path / "store", experts=6, context=CONTEXT)
    tokens = some_tokens()
    found = kl(reference(model, tokens), logits_of(engine, tokens))
    assert float(found.median()) < MEDIAN_KL


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
@pytest.mark.parametrize("model_type", [name for name in NAMES if name not in OTHERWISE])
def test_llama_cpp_reads_the_same_file(tmp_path: Path, model_type):
    """The likelihoods of all tokens are transformers', so that edgemoe and llama.cpp read the same model."""
    model = small_model(model_type)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)
    file, tokens = write_small(model, tmp_path / "model.gguf"), some_tokens()
    lengths = range(8, LENGTH + 1, 3)
    prompts = json.dumps([tokens[:length] for length in lengths])
    run = subprocess.run(
        [sys.executable, "-c", LLAMA_CPP, str(file), prompts],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    want, rows = reference(model, tokens), json.loads(run.stdout.splitlines()[-1])
    found = {length: row for length, row in zip(lengths, rows, strict=True) if row}
    assert len(found) > 3
    for length, row in found.items():
        got = torch.full((VOCABULARY,), -100.0)
        for token, value in row:
            got[token] = value
        assert float(kl(want[length - 1], got)) < LLAMA_KL, length
