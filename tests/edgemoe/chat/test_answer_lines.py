"""The line after an answer, for people and in full."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgemoe.chat.answer_lines import answer_line, format_part, stats_lines
from edgemoe.engine.generate import Answer

ANSWER = Answer(
    text="",
    prompt_tokens=10,
    cached_tokens=4,
    new_tokens=42,
    ttft_s=0.68,
    tpot_s=1 / 24.6,
    hit_rate={"vram": 0.93, "dram": 0.0},
    ssd_bytes_per_token=26e6,
    levels={"8": 0, "4": 9, "2": 1, "0": 0},
    reused=0,
    hot=None,
    lynx=None,
    compensated=None,
    effective_retention=0.9,
    bits=4.21,
    predicted_kl=None,
    bytes_read={"ssd": 10**9, "dram": 0},
    read_retries=0,
    peak_vram_bytes=2_700_000_000,
    peak_process_bytes=3_100_000_000,
    vram_limit_bytes=2_500_000_000,
    limit_bytes=3_000_000_000,
    finish_reason="stop",
    drafts=None,
    stop_string=None,
    batch=1.0,
    tokens=[],
    logprobs=None,
    prompt_logprobs=None,
    queue_s=0.0,
    total_s=2.4,
)

SPEED, BITS = "42 tokens at 24.6 tok/s, first after 0.7 s", "4.2 bits per weight"


@pytest.mark.parametrize(
    ("changes", "device", "line"),
    [
        (
            {},
            False,
            f"{SPEED} · experts: 93 % from memory, 26 MB per token from disk · {BITS} · memory 2.7 of 3 GB",
        ),
        (
            {"hit_rate": {"vram": 0.5, "dram": 0.25}, "bits": 8.0},
            True,
            f"{SPEED} · experts: 50 % from VRAM, 25 % from memory, 26 MB per token from disk · 8 bits per weight · "
            "memory 2.7 of 3 GB",
        ),
        (
            {"hit_rate": {"vram": 0.5, "dram": 0.5}, "ssd_bytes_per_token": 0.0, "finish_reason": "length"},
            False,
            f"{SPEED} · experts: 100 % from memory · {BITS} · memory 2.7 of 3 GB · cut at 42 tokens (--max-new-tokens)",
        ),
        (
            {
                "new_tokens": 1,
                "tpot_s": None,
                "hit_rate": {"vram": None, "dram": None},
                "ssd_bytes_per_token": None,
                "bits": None,
                "finish_reason": "context",
            },
            True,
            "1 token, first after 0.7 s · memory 2.7 of 3 GB · cut: the context is full (--context)",
        ),
    ],
)
def test_the_line_for_people(changes, device, line):
    """Speed, origin of the experts in the machine's words, bits, memory, and why an answer was cut."""
    assert answer_line(replace(ANSWER, **changes), device=device) == line


def test_the_full_line_has_both_rates():
    """Tokens a second and the time per token; where experts were, their bits, and memory, each in a line of its own."""
    assert stats_lines(ANSWER) == [
        "last answer      42 tokens at 24.6 tok/s, 41 ms per token",
        "first token      after 0.68 s; 4 of 10 prompt tokens were kept from earlier turns",
        "experts          93 % from memory; from disk 26 MB per token; in all 1 GB from disk",
        "bits per weight  4.21 on average: 9 experts at 4, 1 experts at 2; 90 % have the highest level",
        "memory           2.7 of 3 GB at most, 3.1 GB with the program itself",
    ]


def test_more_bits_than_wanted_are_explained():
    """Where --bits asks for fewer than an answer had, the line says that memory had more; otherwise it has no word."""
    assert "4.2 bits per weight (3.5 or more wanted)" in answer_line(ANSWER, device=False, least_bits=3.5)
    assert "wanted" not in answer_line(ANSWER, device=False, least_bits=4.2)


@pytest.mark.parametrize(
    ("size", "limit", "text"),
    [
        (999_600_000, 999_700_000, "1 of 1 GB"),
        (5, 900, "5 of 900 B"),
        (11_940_000_000, 12_000_000_000, "11.9 of 12 GB"),
    ],
)
def test_a_part_of_a_limit(size, limit, text):
    """Both have one unit, also where the limit is rounded up into the next."""
    assert format_part(size, limit) == text
