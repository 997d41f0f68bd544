"""The benchmark: TTFT and TPOT of one setting, cold and warm, beside bandwidths measured in the same run.

Metrics as the field defines them: TTFT = t1 - t0, t0 before tokenizing; TPOT = (t_N - t1) / (N - 1);
ITL = single gaps, pooled over runs. The bound is what the bytes moved would take at the measured
bandwidths if everything overlapped that can:

    bound = dense bytes / BW_vram + max(expert bytes / BW_vram, DRAM bytes / BW_dram, SSD bytes / BW_ssd)
"""

from __future__ import annotations

import mmap
import platform
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgemoe import __version__
from edgemoe.conversation import load_tokenizer
from edgemoe.engine import Engine, StoreModel
from edgemoe.generate import Sampler, Sampling, Trace, decode_tokens
from edgemoe.kv import SequenceKV
from edgemoe.plan import MemoryPlan
from edgemoe.process import disk_read_bytes, peak_resident_bytes
from edgemoe.sizes import format_size
from prefetch.base import TransferCounts
from storage.base import ExpertKey, Plane
from storage.errors import UserError
from storage.layout import detect
from storage.reader import RecordReader

PROBE_SECONDS = 1.0
"""How long each bandwidth is measured for."""


@dataclass(frozen=True)
class BenchRequest:
    """What to run. Tokens and runs are counts; prompt_file None means random tokens."""

    prompt_file: Path | None
    prompt_tokens: int
    new_tokens: int
    runs: int
    seed: int


def run_bench(store: StoreModel, plan: MemoryPlan, request: BenchRequest, *, exact: bool) -> dict[str, Any]:
    """Runs cold and warm arms in turn and returns the report (names as in the documentation).

    Raises:
        UserError: the prompt file is missing or too short.
    """
    prompts = _prompts(store, request)
    bandwidth = measure_bandwidth(store, plan.level)
    greedy = Sampling(0, 1, 0, 1, request.seed, request.new_tokens, frozenset())
    arms: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    started = time.perf_counter()
    with Engine(store, plan, exact=exact) as engine:
        load_seconds = time.perf_counter() - started
        sequence = engine.new_sequence()
        for prompt in prompts:
            engine.forget_experts()
            for samples in arms.values():
                samples.append(_run(engine, sequence, list(prompt), request.new_tokens, greedy))
        peak, before = peak_resident_bytes(), engine.resident_before
    # A disk that was slow for one second is not a slow disk: the bound takes the better of before and after.
    bandwidth["ssd"] = max(bandwidth["ssd"], _ssd_bandwidth(store, plan.level))
    rows = [_row(arm, samples, store, plan, bandwidth, peak - before) for arm, samples in arms.items()]
    environment = _environment(store, plan, request) | {"load_s": load_seconds, "peak_process_bytes": peak}
    return {"environment": environment, "rows": rows}


def _run(
    engine: Engine, sequence: SequenceKV, tokens: list[int], new_tokens: int, greedy: Sampling
) -> dict[str, Any]:
    """One prompt and `new_tokens` tokens after it; the end-of-text token does not stop it."""
    sequence.crop(0)
    prompt, disk = len(tokens), disk_read_bytes()
    trace = Trace(time.perf_counter(), [], TransferCounts(), TransferCounts())
    for token in decode_tokens(engine, sequence, tokens, 0, Sampler(greedy), trace):
        del token
        if len(trace.token_times) == new_tokens:
            break
    return {
        "prompt_tokens": prompt,
        "ttft_s": trace.ttft,
        "tpot_s": trace.tpot,
        "itl_s": trace.gaps,
        "prefill": vars(trace.prefill),
        "decode": vars(trace.decode),
        "disk_read_bytes": None if disk is None else (disk_read_bytes() or 0) - disk,
    }


def _prompts(store: StoreModel, request: BenchRequest) -> list[list[int]]:
    """One prompt a run: consecutive pieces of the file, or random tokens of the vocabulary."""
    count, runs = request.prompt_tokens, request.runs
    if request.prompt_file is None:
        generator = torch.Generator().manual_seed(request.seed)
        return torch.randint(store.shape.vocab, (runs, count), generator=generator).tolist()
    try:
        text = request.prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"text was wanted in {request.prompt_file}", str(error), "Give a UTF-8 text file to --prompt-file"
        ) from error
    # Eight characters a token is more than any tokenizer here needs, and keeps a whole book from being encoded.
    ids = load_tokenizer(store.directory)(text[: runs * count * 8])["input_ids"]
    if len(ids) < runs * count:
        raise UserError(
            f"{runs} prompts of {count} tokens were wanted from {request.prompt_file}",
            f"it has {len(ids)} tokens",
            "Give a longer file, fewer --runs or fewer --prompt-tokens",
        )
    return [ids[i * count : (i + 1) * count] for i in range(runs)]


def measure_bandwidth(store: StoreModel, level: int) -> dict[str, float]:
    """Bytes a second of each tier, measured now.

    ssd: whole experts at `level`, four threads, in random order; dram: copying, as a move between tiers does;
    vram: reading, all compute threads, as a kernel does. Memory of both is larger than the caches.
    """
    return {"ssd": _ssd_bandwidth(store, level), "dram": _copy_bandwidth(), "vram": _read_bandwidth()}


def _ssd_bandwidth(store: StoreModel, level: int) -> float:
    keys = [
        ExpertKey(layer, expert)
        for layer, records in store.manifest.layers.items()
        for expert in range(len(records.records))
    ]
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(0)).tolist()
    size = store.manifest.geometry.prefix_bytes(level)
    last = {8: Plane.D8, 4: Plane.D4, 2: Plane.BASE}[level]
    reader = RecordReader.open(store.directory, store.manifest)
    start = time.perf_counter()

    def read(share: list[int]) -> int:
        done = 0
        with mmap.mmap(-1, size) as buffer:
            view = memoryview(buffer)
            for index in share:
                if time.perf_counter() - start > PROBE_SECONDS:
                    break
                done += reader.read(keys[index], Plane.BASE, last, [view])
            view.release()
        return done

    try:
        with ThreadPoolExecutor(4) as pool:
            total = sum(pool.map(read, (order[i::4] for i in range(4))))
    finally:
        reader.close()
    return total / (time.perf_counter() - start)


def _rate(work: Callable[[], object], size: int) -> float:
    work()
    start, times = time.perf_counter(), 0
    while time.perf_counter() - start < PROBE_SECONDS / 2:
        work()
        times += 1
    return size * times / (time.perf_counter() - start)


def _copy_bandwidth() -> float:
    source, target = np.ones(1 << 27, np.uint8), np.ones(1 << 27, np.uint8)
    return _rate(lambda: np.copyto(target, source), source.nbytes)


def _read_bandwidth() -> float:
    data = torch.ones(1 << 25, dtype=torch.float32)
    return _rate(data.sum, data.nbytes)


def summary(values: list[float]) -> dict[str, float | int | None]:
    """mean, p50, p90, p95, p99, std (of the sample) and n; None where undefined."""
    if not values:
        return dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "std"), None) | {"n": 0}
    array = np.array(values)
    percentiles = {f"p{p}": float(np.percentile(array, p)) for p in (50, 90, 95, 99)}
    std = float(array.std(ddof=1)) if len(values) > 1 else None
    return {"mean": float(array.mean()), **percentiles, "std": std, "n": len(values)}


def _row(
    arm: str,
    samples: list[dict[str, Any]],
    store: StoreModel,
    plan: MemoryPlan,
    bandwidth: dict[str, float],
    peak_vram: int,
) -> dict[str, Any]:
    """One row of the report. Bytes and hits are the decode steps'."""
    steps = sum(len(s["itl_s"]) for s in samples)
    total = {key: sum(s["decode"][key] for s in samples) for key in ("ssd_bytes", "dram_bytes", "requests")}
    hits = {tier: sum(s["decode"][f"{tier}_hits"] for s in samples) for tier in ("vram", "dram")}
    expert_bytes = total["requests"] * store.form.bytes_at(plan.level)
    per_token = {
        "ssd": total["ssd_bytes"] / steps,
        "dram": total["dram_bytes"] / steps,
        "vram": expert_bytes / steps + store.dense_bytes_per_token,
    }
    bound = store.dense_bytes_per_token / bandwidth["vram"] + max(
        expert_bytes / steps / bandwidth["vram"],
        per_token["dram"] / bandwidth["dram"],
        per_token["ssd"] / bandwidth["ssd"],
    )
    tpot = summary([s["tpot_s"] for s in samples])
    return {
        "name": f"exact {plan.level}",
        "arm": arm,
        "levels": str(plan.level),
        "retention": None,
        "prefetch": "off",
        "eviction": "lru",
        "vram_limit_bytes": plan.vram_limit_bytes,
        "dram_limit_bytes": plan.dram_limit_bytes,
        "peak_vram_bytes": peak_vram,
        "ttft_s": summary([s["ttft_s"] for s in samples]),
        "tpot_s": tpot,
        "itl_s": summary([gap for s in samples for gap in s["itl_s"]]),
        "prefill_tok_s": sum(s["prompt_tokens"] for s in samples) / sum(s["ttft_s"] for s in samples),
        "decode_tok_s": steps / sum(sum(s["itl_s"]) for s in samples),
        "bytes_per_token": per_token,
        "hit_rate": {tier: n / total["requests"] for tier, n in hits.items()},
        "levels_used": {str(k): sum(s["decode"]["levels"].get(k, 0) for s in samples) for k in (8, 4, 2, 0)},
        "bandwidth": bandwidth,
        "bound_s": bound,
        "fraction_of_bound": bound / tpot["mean"] if tpot["mean"] else None,
        "samples": samples,
    }


def _environment(store: StoreModel, plan: MemoryPlan, request: BenchRequest) -> dict[str, Any]:
    import transformers

    prompt = str(request.prompt_file.name) if request.prompt_file else "random tokens"
    return {
        "edgemoe": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "device": "cpu",
        "layout": store.manifest.layout,
        "kernel_layout": detect().name,
        "model": store.directory.name,
        "source": store.manifest.source,
        "dense_bits": store.manifest.dense_bits,
        "plan": plan.as_json(),
        "prompt": prompt,
        "prompt_tokens": request.prompt_tokens,
        "new_tokens": request.new_tokens,
        "runs": request.runs,
        "seed": request.seed,
    }


def _commit() -> str | None:
    """The commit of the checkout this runs from, with + if it has changes; None outside one."""
    root = Path(__file__).parent.parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report for people: one block an arm."""
    lines = []
    for row in report["rows"]:
        tpot, itl, per_token = row["tpot_s"], row["itl_s"], row["bytes_per_token"]
        lines += [
            f"{row['name']}, {row['arm']} cache, limit {format_size(row['vram_limit_bytes'])}, "
            f"peak {format_size(row['peak_vram_bytes'])}",
            f"  TTFT {row['ttft_s']['mean']:.2f} s   TPOT {1000 * tpot['mean']:.1f} ms   "
            f"ITL p50 {1000 * itl['p50']:.1f} p99 {1000 * itl['p99']:.1f} ms   n = {tpot['n']}",
            f"  hits VRAM {100 * row['hit_rate']['vram']:.1f} % DRAM {100 * row['hit_rate']['dram']:.1f} %   "
            f"per token: SSD {format_size(per_token['ssd'])}, DRAM {format_size(per_token['dram'])}, "
            f"VRAM {format_size(per_token['vram'])}",
            f"  bound {1000 * row['bound_s']:.1f} ms, reached {100 * row['fraction_of_bound']:.0f} %   "
            f"(SSD {format_size(row['bandwidth']['ssd'])}/s, copy {format_size(row['bandwidth']['dram'])}/s, "
            f"read {format_size(row['bandwidth']['vram'])}/s)",
        ]
    return lines
