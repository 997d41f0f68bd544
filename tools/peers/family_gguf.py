"""Writes a GGUF with a real model's layer sizes and random weights, by llama.cpp's own converter.

    python -m tools.peers.family_gguf gpt-oss-20b --layers 8 --experts 32 --llama-source DIR --llama-bin BIN model.gguf
    edgemoe convert model.gguf model-store
    python -m tools.peers.compare --gguf model.gguf --store model-store --limits 2GB,none

The models are the ones of tools.synthetic.family_sizes. llama.cpp's convert_hf_to_gguf.py reads a checkpoint with as
many experts as a token chooses, and llama-quantize makes --type of it; then every layer gets --experts by repeating
these, and a router of as many rows, random as the others. So files of any size need the disk of a small checkpoint. The
tokenizer is the synthetic one, which llama.cpp takes for GPT-2's: both programs get token ids.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from edgemoe.bench.synthetic.tokenizer import save_tokenizer
from edgemoe.errors import EdgemoeError, UserError
from tools.command_line import failed, make_parser, positive
from tools.peers.rewrite_gguf import Replaced, rewrite
from tools.synthetic.family_sizes import MODELS, config_of

CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_k")
"""Names in configs of the number of experts that a token chooses."""

WITH_MTP = {"qwen3_next"}
"""Families whose checkpoints have layers for multi-token prediction, which the converter leaves out by an option."""

MERGE = "Ġ", "Ġ"
"""A vocabulary must have merges, whose results are tokens. The synthetic one has none: its last word gives way."""

CONVERT = dedent("""
    import runpy, sys
    source, *sys.argv[1:] = sys.argv[1:]
    sys.path.insert(0, source)
    from conversion.base import TextModel
    from conversion.glm import Glm4MoeModel
    Glm4MoeModel.set_vocab = TextModel._set_vocab_gpt2
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")
""")
"""A program that runs llama.cpp's converter, which would refuse a tokenizer that it does not know."""


def make(options: argparse.Namespace) -> None:
    """Makes the file.

    Raises:
        UserError: a program of llama.cpp failed.
    """
    known = config_of(options.model, options.layers, 1, options.vocab)
    per_token = next(getattr(known, name) for name in CHOSEN if hasattr(known, name))
    config = config_of(options.model, options.layers, per_token, options.vocab)
    with tempfile.TemporaryDirectory(dir=options.file.absolute().parent) as place:
        source, whole, small = (Path(place) / name for name in ("source", "whole.gguf", "small.gguf"))
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(source)
        save_tokenizer(options.vocab, source)
        _run(
            *(sys.executable, "-c", CONVERT, options.llama_source, source),
            *("--outfile", whole, "--outtype", "bf16"),
            *(("--no-mtp",) if config.model_type in WITH_MTP else ()),
        )
        _run(options.llama_bin / "llama-quantize", whole, small, options.type)
        reader = gguf.GGUFReader(small)
        count = f"{reader.fields[gguf.Keys.General.ARCHITECTURE].contents()}.expert_count"
        random, keys = np.random.default_rng(0), gguf.Keys.Tokenizer
        words = reader.fields[keys.LIST].contents()[:-1]
        rewrite(
            reader,
            options.file,
            lambda tensor: widened(tensor, per_token, options.experts, random),
            {count: options.experts, keys.LIST: [*words, "".join(MERGE)], keys.MERGES: [" ".join(MERGE)]},
        )


def widened(
    tensor: gguf.ReaderTensor, per_token: int, experts: int, random: np.random.Generator
) -> Replaced | None:
    """A layer's tensor for more experts.

    Args:
        tensor: any tensor of the file, whose first dimension in memory counts experts where it has any.
        per_token: the number of experts that it has.
        experts: the number that the copy has.
        random: draws the rows of routers.

    Returns:
        experts repeated, a router's rows drawn anew; None for other tensors.
    """
    name = tensor.name
    if name.endswith("ffn_gate_inp.weight"):
        rows = random.normal(0, float(tensor.data.std()), (experts, tensor.data.shape[1]))
        return rows.astype(np.float32), gguf.GGMLQuantizationType.F32
    if "_exps." in name or "exp_probs_b" in name or name.endswith("ffn_gate_inp.bias"):
        return tensor.data[np.arange(experts) % per_token], tensor.tensor_type
    return None


def _run(*command: object) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise UserError(f"exit code 0 from {command[0]}", str(last or done.returncode), "read its output")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.peers.family_gguf", __doc__)
    parser.add_argument("model", choices=MODELS, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--layers", type=positive, default=6)
    parser.add_argument("--experts", type=positive, default=16, help="experts of a layer")
    parser.add_argument("--vocab", type=positive, default=32000)
    parser.add_argument("--type", default="Q4_0", help="llama.cpp's type of most weights; default: Q4_0")
    parser.add_argument("--llama-source", type=Path, required=True, help="llama.cpp's source code")
    parser.add_argument("--llama-bin", type=Path, required=True, help="folder of llama-quantize")
    parser.add_argument("file", type=Path, metavar="FILE", help="the GGUF to write")
    try:
        make(parser.parse_args(argv))
    except EdgemoeError as error:
        return failed("tools.peers.family_gguf", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
