"""The cost of an answer: one line after it, or a table with every figure."""

from __future__ import annotations

from edgemoe.console.sizes import format_size
from edgemoe.engine.generate import Answer

LABEL = 17
"""Width of the column of names."""


def answer_line(answer: Answer, *, device: bool, least_bits: float | None = None) -> str:
    """Describes an answer for people: speed, where its experts came from, bits, memory, and why it was cut.

    Args:
        answer: a finished one.
        device: VRAM is a GPU's memory; without one all tiers are the machine's memory.
        least_bits: mean bits per weight of --bits; None: the option was not given.
    """
    parts = [_speed(answer), _experts(answer, device), _bits(answer, least_bits)]
    parts += [f"memory {format_part(answer.peak_vram_bytes, answer.limit_bytes)}", _cut(answer)]
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
    return f"experts: {hits}" + (f", {format_size(read)} per token from disk" if read else "")


def _bits(answer: Answer, least: float | None) -> str:
    """The mean bits of the experts that were computed; more than wanted where memory had more of their bits."""
    if answer.bits is None:
        return ""
    more = least is not None and round(answer.bits, 1) > round(least, 1)
    return f"{round(answer.bits, 1):g} bits per weight" + (f" ({least:g} or more wanted)" if more else "")


def _cut(answer: Answer) -> str:
    if answer.finish_reason == "length":
        return f"cut at {answer.new_tokens} tokens (--max-new-tokens)"
    return "cut: the context is full (--context)" if answer.finish_reason == "context" else ""


def stats_lines(answer: Answer) -> list[str]:
    """Describes every cost of an answer, a line for each with its name first."""
    tpot = f"{_rate(answer.tpot_s)}, {1000 * answer.tpot_s:.0f} ms per token" if answer.tpot_s else "-"
    reused = f"{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens were kept from earlier turns"
    peak = format_part(answer.peak_vram_bytes, answer.limit_bytes)
    parts = [
        ("last answer", f"{answer.new_tokens} tokens at {tpot}"),
        ("reasoning", f"{answer.reasoning_tokens} of these tokens" if answer.reasoning_tokens else ""),
        ("first token", f"after {answer.ttft_s:.2f} s; {reused}"),
        ("experts", _tiers(answer)),
        ("bits per weight", _levels(answer)),
        ("hot experts", _hot(answer)),
        ("compensated", _compensated(answer)),
        ("guesses", _drafts(answer)),
        ("memory", f"{peak} at most, {format_size(answer.peak_process_bytes)} with the program itself"),
    ]
    return [f"{name:<{LABEL}}{text}" for name, text in parts if text]


def _tiers(answer: Answer) -> str:
    """Where the experts of new tokens were, and what was read."""

    def percent(fraction: float | None) -> str:
        return "-" if fraction is None else f"{100 * fraction:.0f} %"

    vram, dram = answer.hit_rate["vram"], answer.hit_rate["dram"]
    second = f", {percent(dram)} from the second tier" if dram or answer.bytes_read["dram"] else ""
    copied = f" and {format_size(answer.bytes_read['dram'])} from the second tier" if second else ""
    read = answer.ssd_bytes_per_token
    per_token = "" if read is None else f"; from disk {format_size(read)} per token"
    retried = f", {answer.read_retries} reads repeated" if answer.read_retries else ""
    in_all = f"; in all {format_size(answer.bytes_read['ssd'])} from disk{copied}{retried}"
    return f"{percent(vram)} from memory{second}{per_token}{in_all}"


def _levels(answer: Answer) -> str:
    """How many experts were computed at which bits, and what that is estimated to cost."""
    used = {int(level): count for level, count in answer.levels.items() if count}
    counts = [f"{count} experts at {level}" for level, count in used.items() if level]
    counts += [f"{used[0]} left out"] if used.get(0) else []
    mean = "" if answer.bits is None else f"{answer.bits:.2f} on average: "
    more = f"; {answer.reused} had more bits in memory than were chosen" if answer.reused else ""
    share = answer.effective_retention
    top = f"; {100 * share:.0f} % have the highest level" if share is not None and share < 1 else ""
    cost = ""
    if answer.bits is not None and answer.predicted_kl is not None:
        cost = f"; estimated loss of quality: KL {answer.predicted_kl:.2g}"
    return f"{mean}{', '.join(counts) or '-'}{more}{top}{cost}"


def _drafts(answer: Answer) -> str:
    """How many guesses at further tokens were right."""
    drafts = answer.drafts
    return f"{drafts['accepted']} of {drafts['drafted']} were right (--draft)" if drafts else ""


def _hot(answer: Answer) -> str:
    """The hot experts and their moves; "" where precision does not follow use."""
    hot = answer.hot
    if hot is None:
        return ""
    return (
        f"{hot['experts']}; {hot['promoted']} promoted, {hot['demoted']} demoted, {hot['deferred']} deferred, "
        f"{format_size(hot['moved_bytes'])} read in the background"
    )


def _compensated(answer: Answer) -> str:
    """How many (token, expert) pairs had a compensator, and what was read for it; "" where none may have one."""
    found = answer.compensated
    return (
        ""
        if found is None
        else f"{found['pairs']} experts of tokens ({format_size(found['bytes_read'])} read)"
    )
