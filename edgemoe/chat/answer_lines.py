"""The line after an answer: its time and resources, in short for people or in full."""

from __future__ import annotations

from edgemoe.console.sizes import format_size
from edgemoe.engine.generate import Answer


def answer_line(answer: Answer, *, device: bool) -> str:
    """Describes an answer for people: speed, where its experts came from, bits, memory, and why it was cut.

    Args:
        answer: a finished one.
        device: VRAM is that of a GPU; without one all tiers are the machine's memory.
    """
    parts = [_speed(answer), _experts(answer, device), _bits(answer)]
    parts += [format_part(answer.peak_vram_bytes, answer.limit_bytes), _cut(answer)]
    return " · ".join(part for part in parts if part)


def format_part(size: int, limit: int) -> str:
    """Formats a size next to its limit, in the limit's unit.

    >>> format_part(17_800_000, 27_000_000), format_part(900_000, 3_000_000_000)
    ('17.8 of 27 MB', '0.0009 of 3 GB')
    """
    number, unit = format_size(limit).split()
    scale = 1000 ** ("B", "KB", "MB", "GB", "TB").index(unit)
    return f"{size / scale:.3g} of {number} {unit}"


def _speed(answer: Answer) -> str:
    tokens = f"{answer.new_tokens} token{'' if answer.new_tokens == 1 else 's'}"
    rate = f" at {_rate(answer.tpot_s)}" if answer.tpot_s else ""
    return f"{tokens}{rate}, first after {answer.ttft_s:.{1 if answer.ttft_s >= 0.1 else 2}f} s"


def _rate(tpot: float) -> str:
    return f"{1 / tpot:.{0 if tpot < 0.01 else 1}f} tok/s"


def _experts(answer: Answer, device: bool) -> str:
    """Where the experts of new tokens were; "" for an answer without any."""
    vram, dram = answer.hit_rate["vram"], answer.hit_rate["dram"] or 0.0
    if vram is None:
        return ""
    hits = f"{100 * vram:.0f} % from VRAM" if device else f"{100 * (vram + dram):.0f} % from memory"
    if device and dram:
        hits += f", {100 * dram:.0f} % from memory"
    read = answer.ssd_bytes_per_token
    return f"experts: {hits}" + (f", {format_size(read)}/token from disk" if read else "")


def _bits(answer: Answer) -> str:
    return "" if answer.bits is None else f"{round(answer.bits, 1):g} bits"


def _cut(answer: Answer) -> str:
    if answer.finish_reason == "length":
        return f"cut at {answer.new_tokens} tokens (--max-new-tokens)"
    return "cut: the context is full (--context)" if answer.finish_reason == "context" else ""


def stats_line(answer: Answer) -> str:
    """Describes every cost of an answer in one line."""

    def percent(fraction: float | None) -> str:
        return "-" if fraction is None else f"{100 * fraction:.0f} %"

    per_token = "-" if answer.ssd_bytes_per_token is None else f"{answer.ssd_bytes_per_token / 1e6:.1f}"
    levels = " ".join(f"{level}:{count}" for level, count in answer.levels.items() if count)
    reused = f" ({answer.reused} above their schedule)" if answer.reused else ""
    retried = f", {answer.read_retries} read retries" if answer.read_retries else ""
    retention = ""
    if answer.effective_retention is not None and answer.effective_retention < 1:
        retention = f", {100 * answer.effective_retention:.0f} % at the highest level"
    return (
        f"{_times(answer)}, "
        f"hits VRAM {percent(answer.hit_rate['vram'])} DRAM {percent(answer.hit_rate['dram'])}, "
        f"{per_token} MB/token from SSD, in all {format_size(answer.bytes_read['ssd'])} from SSD and "
        f"{format_size(answer.bytes_read['dram'])} from DRAM{retried}, "
        f"levels {levels or '-'}{reused}{retention}{_cost(answer)}{_hot(answer)}{_compensated(answer)}, "
        f"peak {format_size(answer.peak_vram_bytes)} of {format_size(answer.limit_bytes)} "
        f"(whole process {format_size(answer.peak_process_bytes)})"
    )


def _hot(answer: Answer) -> str:
    """The hot experts, and what has moved, where precision follows hotness."""
    hot = answer.hot
    if hot is None:
        return ""
    return (
        f", {hot['experts']} experts hot ({hot['promoted']} promoted, {hot['demoted']} demoted, "
        f"{hot['deferred']} deferred, {format_size(hot['moved_bytes'])} in the background)"
    )


def _compensated(answer: Answer) -> str:
    """How many (token, expert) pairs were computed with a compensator, where any may be, and what was read for it."""
    found = answer.compensated
    if found is None:
        return ""
    return f", {found['pairs']} pairs compensated ({format_size(found['bytes_read'])} read)"


def _cost(answer: Answer) -> str:
    """Bits and predicted KL, where levels go by damage."""
    if answer.bits is None or answer.predicted_kl is None:
        return ""
    return f", {answer.bits:.2f} bits per weight for a predicted KL of {answer.predicted_kl:.2g}"


def _times(answer: Answer) -> str:
    """Times and token counts."""
    tpot = f"{1000 * answer.tpot_s:.0f} ms ({_rate(answer.tpot_s)})" if answer.tpot_s else "-"
    return (
        f"TTFT {answer.ttft_s:.2f} s, TPOT {tpot}, {answer.new_tokens} tokens "
        f"({answer.cached_tokens} of {answer.prompt_tokens} prompt tokens reused)"
    )
