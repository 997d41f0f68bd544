"""Compares edgemoe's greedy answers with transformers' bf16 answers, prompt by prompt, on small chat tasks.

    python -m tools.peers.compare_transformers CHECKPOINT [--exact 8] [--prompts 100] [--limit-over-minimum 1.05]
        [--json]
    python -m tools.peers.compare_transformers CHECKPOINT --own-prompts [--seed 0]

edgemoe's limit is --limit-over-minimum times the smallest that its plan allows, so that decoding reads experts. Prints
how many answers are equal as text; exits 1 if the fraction is below --at-least.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from edgemoe.api.model import Model
from edgemoe.chat.conversation import Conversation
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.sampling import Sampling
from edgemoe.evaluate.tasks import KINDS, held_out_tasks
from edgemoe.models.resolve import resolve_store
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.record.offsets import MatrixSpec
from edgemoe.storage.record.planes import dequantize, quantize
from tools.command_line import make_parser

_MARK = "."
_TOGETHER = 32
_MOST_SAMPLES = 40 * _TOGETHER


def task_prompts(count: int, seed: int) -> list[str]:
    """Returns `count` distinct first questions of held-out chat tasks, every kind in turn."""
    each = -(-count // len(KINDS))
    columns = [held_out_tasks(kind, 2 * each, seed) for kind in KINDS]
    prompts = dict.fromkeys(task.turns[0].question for row in zip(*columns, strict=True) for task in row)
    return list(prompts)[:count]


def own_prompts(checkpoint: Path, tokenizer: Any, count: int, seed: int) -> list[str]:
    """Samples `count` distinct questions from the checkpoint, in the wording of its training.

    The checkpoint runs in float32, so that neither side of the comparison shapes the prompts.

    Raises:
        SystemExit: the checkpoint writes fewer distinct questions.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    turn = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    before, after = turn.split(_MARK)
    ids = tokenizer(before, return_tensors="pt", add_special_tokens=False).input_ids
    end = after.split("\n")[0]
    torch.manual_seed(seed)
    prompts: dict[str, None] = {}
    for _ in range(_MOST_SAMPLES // _TOGETHER):
        with torch.inference_mode():
            rows = model.generate(
                ids.repeat(_TOGETHER, 1),
                attention_mask=torch.ones(_TOGETHER, ids.shape[1], dtype=torch.int64),
                do_sample=True,
                temperature=0.8,
                top_p=0.95,
                max_new_tokens=48,
                pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
            )
        for row in rows[:, ids.shape[1] :]:
            text, found, _ = tokenizer.decode(row, skip_special_tokens=False).partition(end)
            # In a file of prompts a question of several lines would be several prompts.
            if found and text.strip() and "<|" not in text and "\n" not in text.strip():
                prompts.setdefault(text.strip())
        if len(prompts) >= count:
            return list(prompts)[:count]
    raise SystemExit(f"expected {count} distinct prompts, got {len(prompts)}: lower --prompts")


def reference_answers(
    checkpoint: Path,
    tokenizer: Any,
    prompts: list[str],
    tokens: int,
    dtype: str = "bfloat16",
    level: int | None = None,
    attention: str | None = None,
) -> list[str]:
    """Generates transformers' greedy answers.

    Args:
        checkpoint: model directory.
        tokenizer: the model's tokenizer, with a chat template.
        prompts: one question each.
        tokens: maximum new tokens of an answer.
        dtype: dtype of the model.
        level: round the experts' weights to this level; None: leave them as they are.
        attention: transformers' attention implementation; None: its default.
    """
    chosen = {"attn_implementation": attention} if attention else {}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype), **chosen).eval()
    if level:
        round_experts(model, level)
    answers = []
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.inference_mode():
            out = model.generate(
                **ids, max_new_tokens=tokens, do_sample=False, eos_token_id=tokenizer.eos_token_id
            )
        answers.append(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def round_experts(model: Any, level: int) -> None:
    """Replaces every expert's weights [N, K] by their values at a level, in the model's dtype."""
    for module in model.modules():
        if hasattr(module, "_apply_gate"):
            for stacked in (module.gate_up_proj.data, module.down_proj.data):
                group = MatrixSpec.of("one", *stacked.shape[1:]).group
                for weight in stacked:
                    weight.copy_(dequantize(*quantize(weight, group), level))


def edgemoe_answers(
    store: StoreModel, tokenizer: Any, prompts: list[str], tokens: int, *, exact: int, over_minimum: float
) -> tuple[list[str], dict[str, float]]:
    """Generates edgemoe's greedy answers at level `exact` under a limit, each in its own conversation.

    Returns:
        the answers; and their cost: the limit, experts resident, bytes read a token, peak bytes.
    """
    settings = RunSettings.uniform(exact)
    smallest = store.plan(vram_limit=None, settings=settings, context=512).minimum_vram_bytes
    plan = store.plan(vram_limit=int(smallest * over_minimum), settings=settings, context=512)
    sampling = Sampling(0, 1, 0, 1, 0, tokens, frozenset({tokenizer.eos_token_id}))
    answers, read, peak = [], [], 0
    with Engine(store, plan, settings) as engine:
        model = Model(engine, tokenizer, sampling)
        for prompt in prompts:
            answer = Conversation(model).ask(prompt, lambda _: None)
            answers.append(answer.text)
            read.append(answer.ssd_bytes_per_token or 0.0)
            peak = max(peak, answer.peak_vram_bytes)
    cost = {
        "vram_limit_bytes": plan.vram_limit_bytes,
        "minimum_vram_bytes": smallest,
        "experts_resident": plan.vram_experts,
        "ssd_bytes_per_decoded_token": sum(read) / len(read),
        "peak_vram_bytes": peak,
    }
    return answers, cost


def options() -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("tools.peers.compare_transformers", __doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--store", type=Path, help="a store of the same checkpoint, e.g. with --dense-bits 8")
    parser.add_argument("--exact", type=int, default=8, choices=(8, 4, 2))
    parser.add_argument("--prompts", type=int, default=100)
    prompts_from = parser.add_mutually_exclusive_group()
    prompts_from.add_argument(
        "--prompt-file",
        type=Path,
        help="one prompt a line, of which the first --prompts are used; default: held-out tasks",
    )
    prompts_from.add_argument(
        "--own-prompts", action="store_true", help="questions sampled from the checkpoint"
    )
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--limit-over-minimum", type=float, default=1.05)
    parser.add_argument("--at-least", type=float, default=0.95, help="fraction of answers that must be equal")
    parser.add_argument(
        "--reference-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="float32 shows how often bf16 rounding in transformers changes an answer",
    )
    parser.add_argument(
        "--rounded-reference",
        action="store_true",
        help="also count equal answers of transformers with its experts' weights rounded to --exact",
    )
    parser.add_argument(
        "--eager-reference",
        action="store_true",
        help="also count equal answers of transformers with eager attention",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def prompts_of(options: argparse.Namespace, tokenizer: Any) -> list[str]:
    """The prompts that the command line names."""
    if options.prompt_file:
        lines: list[str] = options.prompt_file.read_text().splitlines()
        return lines[: options.prompts]
    if options.own_prompts:
        return own_prompts(options.checkpoint, tokenizer, options.prompts, options.seed)
    return task_prompts(options.prompts, options.seed)


def main() -> int:
    """Runs the command line; returns the exit code."""
    given = options()
    store = StoreModel.open(resolve_store(given.store or given.checkpoint))
    tokenizer = load_tokenizer(store.directory)
    prompts = prompts_of(given, tokenizer)

    def reference(**changed: Any) -> list[str]:
        return reference_answers(
            given.checkpoint, tokenizer, prompts, given.new_tokens, given.reference_dtype, **changed
        )

    wanted = reference()

    def same_as(answers: list[str]) -> int:
        return sum(a == b for a, b in zip(wanted, answers, strict=True))

    got, cost = edgemoe_answers(
        store, tokenizer, prompts, given.new_tokens, exact=given.exact, over_minimum=given.limit_over_minimum
    )
    same = same_as(got)
    if given.rounded_reference:
        cost["same_by_transformers"] = same_as(reference(level=given.exact))
    if given.eager_reference:
        cost["same_by_eager_attention"] = same_as(reference(attention="eager"))
    if given.json:
        print(json.dumps({"exact": given.exact, "prompts": len(prompts), "same": same, **cost}))
    else:
        for prompt, wants, answer in zip(prompts, wanted, got, strict=True):
            if wants != answer:
                print(f"{prompt}\n  transformers: {wants!r}\n  edgemoe:      {answer!r}")
        print(f"{same} of {len(prompts)} answers are the same text at exact {given.exact}; {cost}")
    return 0 if same >= given.at_least * len(prompts) else 1


if __name__ == "__main__":
    sys.exit(main())
