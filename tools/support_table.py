"""Writes the tables of families, formats and GGUF architectures in docs/models.md from the tests that pass.

    python -m tools.support_table            runs the tests, rewrites the tables
    python -m tools.support_table --check    exits 1 if a table would change

A row says yes when at least one test is marked `covers(row)` and all of these tests pass. A table stands between
`<!-- families -->`, `<!-- formats -->` or `<!-- architectures -->` (of GGUF files) and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from edgemoe.families.table import REFUSED, TEXT_HALVES
from edgemoe.families.traits import TRAITS
from edgemoe.storage.formats import FORMATS
from edgemoe.storage.formats.ggml import READABLE
from edgemoe.storage.formats.gguf_architectures import ARCHITECTURES
from edgemoe.storage.formats.gguf_refused import REASONS
from edgemoe.storage.formats.gguf_row import Architecture
from tools.checkout import ROOT
from tools.command_line import make_parser

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
"""Rows that a table must have, with yes, or with no and a reason."""

_CODES = "its codes exactly; matrices without any coded again"
_FLOATS = "level 8"

FORMAT_REMARKS = {
    "safetensors": ("bf16, fp16, fp32; one file or shards with an index", _FLOATS),
    "FP8": ("E4M3 with a scale per block, or per matrix", _FLOATS),
    "GPTQ": ("4, 8 and 2 bits, v1 and v2, any group; with act-order coded again", _CODES),
    "AutoRound": ("packed as GPTQ (auto_round, auto_gptq, gptqmodel) or AWQ", _CODES),
    "AWQ": ("4 bits, version gemm, any group", _CODES),
    "compressed-tensors": (
        "int4 and int8 packed, int8 and FP8 by row, group, block or matrix, NVFP4, MXFP4; several schemes",
        _CODES,
    ),
    "MXFP4": ("gpt-oss's blocks and scales", "coded again: its values are not evenly spaced"),
    "GGUF": (
        f"one file, or all parts of a split one, of {', '.join(sorted(kind.name for kind in READABLE))}, with its "
        "tokenizer and chat template; the architectures are in a table of their own",
        "the codes of Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K and Q8_0 exactly, matrix by matrix; others coded again",
    ),
}
"""Name of a format -> (its supported variants, the stored form of its experts)."""

_SECTION = re.compile(r"<!-- (families|formats|architectures) -->\n(.*?)\n?<!-- end -->", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Args:
        name: name of a family or format, the argument of `covers`.
        remark: the forms or variants that are read, or the models of a family that people know.
        refused: why the family is not supported; None: it is supported.
    """

    name: str
    remark: str
    refused: str | None = None


def rows_of(section: str) -> list[Row]:
    """The rows of a section: families by name, others in their registry's order, and the refused ones last."""
    if section == "formats":
        return [Row(name, "; stored: ".join(FORMAT_REMARKS[name])) for name in FORMATS]
    if section == "architectures":
        read = [Row(f"GGUF {name}", _models_of(each)) for name, each in ARCHITECTURES.items()]
        return read + [Row(f"GGUF {name}", "", why) for name, why in REASONS.items()]
    outer = {text: f"; in a multimodal checkpoint `{name}`" for name, text in TEXT_HALVES.items()}
    known = [Row(name, traits.models + outer.get(name, "")) for name, traits in TRAITS.items()]
    return sorted(known, key=lambda row: row.name) + [Row(name, "", why) for name, why in REFUSED.items()]


def _models_of(architecture: Architecture) -> str:
    """The models that a GGUF architecture stands for, as people know them."""
    return "; ".join(TRAITS[name].models for name in architecture.model_types)


@dataclass(eq=False)  # a plugin of pytest, which some versions of it want to hash
class Outcomes:
    """A pytest plugin that counts the tests of every row.

    Attributes:
        passed: name of a row -> number of passed tests.
        failed: name of a row -> ids of failed and skipped tests.
    """

    passed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _covers: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Deselects the tests that cover no row."""
        for item in items:
            self._covers[item.nodeid] = tuple(
                name for mark in item.iter_markers("covers") for name in mark.args
            )
        items[:] = [item for item in items if self._covers[item.nodeid]]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test after its call, and a setup or teardown that fails."""
        if report.passed and report.when != "call":
            return
        for name in self._covers[report.nodeid]:
            if report.passed:
                self.passed[name] += 1
            else:
                self.failed[name].append(report.nodeid)


def table(section: str, outcomes: Outcomes) -> str:
    """The Markdown table of a section."""
    head = {"families": "Family", "formats": "Format", "architectures": "Architecture"}[section]
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
    return f"yes ({passed} test{'s' if passed > 1 else ''})" if passed else "no: nothing tests it"


def sections(text: str) -> dict[str, str]:
    """The tables of a document by section."""
    return {match[1]: match[2] for match in _SECTION.finditer(text)}


def rewritten(text: str, outcomes: Outcomes) -> str:
    """Replaces every table of a document."""
    return _SECTION.sub(lambda match: f"<!-- {match[1]} -->\n{table(match[1], outcomes)}\n<!-- end -->", text)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if --check finds a table that would change, 0 otherwise."""
    parser = make_parser("tools.support_table", __doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table would change")
    check: bool = parser.parse_args(argv).check
    outcomes = Outcomes()
    pytest.main(
        ["-q", "-m", "covers", "--continue-on-collection-errors", str(ROOT / "tests")], plugins=[outcomes]
    )
    stale = []
    for path in FILES:
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        new = rewritten(old, outcomes)
        if new != old:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(new, encoding="utf-8")
    print(f"tools.support_table: {', '.join(stale) or 'nothing'} to change", file=sys.stderr)
    return int(bool(stale) and check)


if __name__ == "__main__":
    sys.exit(main())
