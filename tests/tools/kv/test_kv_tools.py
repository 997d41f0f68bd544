"""tools/kv: quality and times of formats of keys and values, on the tiny store."""

from __future__ import annotations

import pytest
import torch

from tools.kv import filled, quality, windows

pytestmark = pytest.mark.e2e


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog " * 40)
    return path


def rows(out: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if "|" in line]


def test_fewer_bits_cost_more(tiny_store, text, capsys, monkeypatch):
    """bf16 against itself has no KL, and q8_0 has less than q4_0; bytes are the format's."""
    monkeypatch.setattr(quality, "DECODED", 8)
    options = ["--text", str(text), "--window", "40", "--windows", "2", "--formats", "q8_0", "q4_0"]
    assert quality.main([str(tiny_store), *options]) == 0
    table = {row[0]: row for row in rows(capsys.readouterr().out)[2:]}
    assert list(table) == ["bf16", "q8_0", "q4_0"]
    kl = {name: (float(row[2]), float(row[5])) for name, row in table.items()}
    assert kl["bf16"] == (0, 0)
    assert all(0 < kl["q8_0"][i] < kl["q4_0"][i] for i in (0, 1))
    # Two layers with attention of 2 heads of 16 keys and values would take 4 * 16 * 2 * layers bytes in bf16.
    assert int(table["bf16"][1]) > int(table["q8_0"][1]) > int(table["q4_0"][1])


def test_copied_tokens_are_counted(monkeypatch):
    """With a half of four tokens, the three after its first one count, when it comes a second time."""
    seen = []

    def logits(engine, window):
        seen.extend(window)
        table = torch.zeros(len(window), 10)
        for row, token in enumerate([5, 6, 7, 5, 6, 0, 8, 9]):  # of the last four rows 6 and 8 are right
            table[row, token] = 1
        return table[:6], table[6:]

    monkeypatch.setattr(quality, "window_logits", logits)
    assert quality.copied(None, [5, 6, 7, 8, 1, 1, 1, 1]) == pytest.approx(2 / 3)
    assert seen == [5, 6, 7, 8] * 2


def test_a_text_below_a_window_and_unknown_formats_are_refused(tiny_store, text, capsys):
    options = ["--text", str(text), "--window"]
    assert quality.main([str(tiny_store), *options, "100000"]) == 2
    assert "choose a smaller --window" in capsys.readouterr().err
    assert quality.main([str(tiny_store), *options, "40"]) == 2
    assert "more than the 64 tokens" in capsys.readouterr().err
    assert quality.main([str(tiny_store), *options, "70", "--formats", "q5"]) == 2
    assert "--kv-cache-k" in capsys.readouterr().err


@pytest.mark.parametrize("attention", [[], ["--attention"]])
def test_each_format_and_length_has_a_row(tiny_store, capsys, attention):
    options = ["--limit", "20MB", "--context", "64", "--filled", "0", "40", "--tokens", "3", "--rounds", "1"]
    assert filled.main([str(tiny_store), *options, *attention]) == 0
    found = rows(capsys.readouterr().out)
    assert [(row[0], row[1]) for row in found] == [
        (f, n) for f in ("bf16", "q8_0", "q4_0") for n in ("0", "40")
    ]
    assert all(float(row[2].split()[0]) > 0 for row in found)


def test_windows_save_memory_in_long_contexts_alone(capsys):
    """A row for each context; where no window is dropped both sizes are one."""
    options = ["gpt-oss-20b", "--context", "1024", "65536", "--tokens", "40"]
    assert windows.main(options) == 0
    short, long = rows(capsys.readouterr().out)[2:]
    assert short[2] == short[3]
    assert 0.5 < float(long[3]) / float(long[2]) < 0.6
    assert float(long[4]) > 0


def test_a_limit_that_is_too_small_is_refused(tiny_store, capsys):
    assert filled.main([str(tiny_store), "--limit", "10kB", "--context", "64"]) == 3
    assert "--vram-limit" in capsys.readouterr().err
