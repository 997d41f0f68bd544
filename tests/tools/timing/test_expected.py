"""tools/timing/expected.py: rows of a report of `edgemoe bench` next to what a plan expects."""

from __future__ import annotations

import json

from tools.timing import expected


def test_a_row_by_hand(tiny_store, tmp_path, capsys):
    """With everything in memory all experts are found, and 8 ms per token are 125 tokens per second."""
    row = {
        **{"levels": "8", "setting": "8", "arm": "warm", "retention": None, "bits": None, "exact": False},
        **{
            "vram_limit_bytes": 10**9,
            "dram_limit_bytes": 0,
            "plan": {"context": 64},
            "hit_rate": {"vram": 0.98},
        },
        **{"tpot_s": {"mean": 0.008}, "bandwidth": {"ssd": 1e9, "dram": 1e9, "vram": 1e9}},
    }
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"rows": [row]}))
    assert expected.main([str(tiny_store), str(report)]) == 0
    cells = capsys.readouterr().out.splitlines()[2].strip("| ").split(" | ")
    assert cells[:6] == ["1 GB", "8", "warm", "100 %", "100 to 100 %", "98 %"]
    assert cells[7] == "125.0"
