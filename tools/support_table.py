"""The tables of families and formats in docs, from the tests that passed.

    .venv/bin/python -m tools.support_table            runs the tests, rewrites the tables
    .venv/bin/python -m tools.support_table --check    exits 1 where a table would change

A row says yes when every test marked `covers(row)` passed and there is at least one. A table stands between
`<!-- families -->` or `<!-- formats -->` and `<!-- end -->`, in any of the files below.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from edgemoe.families.base import Family
from edgemoe.families.table import FAMILIES, REFUSED
from storage.formats import FORMATS

ROOT = Path(__file__).resolve().parents[1]
FILES = (ROOT / "docs" / "models.md",)

REQUIRED = {
    "families": (
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "mixtral",
        "olmoe",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "gpt_oss",
        "phimoe",
        "granitemoe",
        "ernie4_5_moe",
        "llama4",
    ),
    "formats": (
        "safetensors",
        "FP8",
        "GPTQ",
        "AutoRound",
        "AWQ",
        "compressed-tensors",
        "MXFP4",
        "GGUF",
    ),
}
"""Rows that a table must have, whether with yes or with no and a reason."""


@dataclass(frozen=True)
class Row:
    """One row: what a test covers, and what to say of it.

    Args:
        name: of a family or format.
        remark: what of it is read, or how.
        refused: why it is not supported; None: it is.
    """

    name: str
    remark: str
    refused: str | None = None


def rows_of(section: str) -> list[Row]:
    """The rows that a section's registry has, in its order."""
    if section == "formats":
        return [Row(one.name, f"{one.variants}; stored: {one.stored}") for one in FORMATS]
    known = [Row(family.model_type, _remark(family)) for family in FAMILIES.values()]
    return sorted(known, key=lambda row: row.name) + [Row(name, "", why) for name, why in REFUSED.items()]


def _remark(family: Family) -> str:
    """In which forms a family's experts are read."""
    return (
        "experts fused by layer" if family.expert_names is None else "experts one by one, or fused by layer"
    )


@dataclass
class Outcomes:
    """A pytest plugin that counts the tests of every row.

    Attributes:
        passed: row's name -> tests that passed.
        failed: row's name -> tests that did not, skipped ones included.
    """

    passed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _covers: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keeps the tests that cover a row."""
        for item in items:
            self._covers[item.nodeid] = tuple(
                name for mark in item.iter_markers("covers") for name in mark.args
            )
        items[:] = [item for item in items if self._covers[item.nodeid]]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test when its body has run, or when something before or after it went wrong."""
        if report.passed and report.when != "call":
            return
        for name in self._covers[report.nodeid]:
            if report.passed:
                self.passed[name] += 1
            else:
                self.failed[name].append(report.nodeid)


def table(section: str, outcomes: Outcomes) -> str:
    """A section's table as Markdown."""
    head = "Family" if section == "families" else "Format"
    lines = [f"| {head} | Supported | |", "|---|---|---|"]
    for row in rows_of(section):
        lines.append(f"| `{row.name}` | {_verdict(row, outcomes)} | {row.remark} |")
    return "\n".join(lines)


def _verdict(row: Row, outcomes: Outcomes) -> str:
    if row.refused is not None:
        return f"no: {row.refused}"
    passed, failed = outcomes.passed[row.name], outcomes.failed[row.name]
    if failed:
        return f"no: {len(failed)} of {passed + len(failed)} tests failed"
    return f"yes ({passed} tests)" if passed else "no: nothing tests it"


def sections(text: str) -> dict[str, str]:
    """section -> the table that stands in a file."""
    return {match[1]: match[2] for match in _SECTION.finditer(text)}


def rewritten(text: str, outcomes: Outcomes) -> str:
    """A file with every table in it made anew."""
    return _SECTION.sub(lambda match: f"<!-- {match[1]} -->\n{table(match[1], outcomes)}\n<!-- end -->", text)


_SECTION = re.compile(r"<!-- (families|formats) -->\n(.*?)\n?<!-- end -->", re.DOTALL)


def main() -> int:
    """Exit 0; 1 where --check finds a table that would change."""
    parser = argparse.ArgumentParser(
        description="Runs the tests of families and formats, and rewrites their tables."
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 where a table would change"
    )
    check: bool = parser.parse_args().check
    outcomes = Outcomes()
    pytest.main(["-q", "--continue-on-collection-errors", str(ROOT / "tests")], plugins=[outcomes])
    stale = []
    for path in FILES:
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        new = rewritten(old, outcomes)
        if new != old:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(new, encoding="utf-8")
    print(f"support_table: {', '.join(stale) or 'nothing'} to change", file=sys.stderr)
    return int(bool(stale) and check)


if __name__ == "__main__":
    sys.exit(main())
