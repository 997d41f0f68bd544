"""tools/support_table.py: its verdicts, and the committed tables against the registries."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import support_table
from tools.support_table import FILES, REQUIRED, Outcomes, rewritten, rows_of, sections

pytestmark = pytest.mark.e2e

DOCS = FILES[0].read_text(encoding="utf-8")


def committed(section: str) -> dict[str, tuple[str, str]]:
    """The (verdict, remark) of each row of a table in docs/models.md."""
    cells = re.findall(r"^\| `([^`]+)` \| (.*) \| (.*) \|$", sections(DOCS)[section], re.MULTILINE)
    return {name: (verdict, remark) for name, verdict, remark in cells}


def test_docs_have_the_table_of_families():
    """docs/models.md has the table that test_committed_table_equals_the_registry reads."""
    assert "families" in sections(DOCS)


@pytest.mark.parametrize("section", sections(DOCS))
def test_committed_table_equals_the_registry(section):
    """docs/models.md has exactly the registry's rows, each with its remark and a verdict."""
    found = committed(section)
    assert {name: remark for name, (_, remark) in found.items()} == {
        row.name: row.remark for row in rows_of(section)
    }
    for row in rows_of(section):
        verdict = found[row.name][0]
        wanted = (
            r"yes \((?:1 test|[1-9]\d* tests)\)" if row.refused is None else f"no: {re.escape(row.refused)}"
        )
        assert re.fullmatch(wanted, verdict), (row.name, verdict)


@pytest.mark.parametrize("section", REQUIRED)
def test_no_required_row_is_missing(section):
    """Every row of REQUIRED exists."""
    assert set(REQUIRED[section]) <= {row.name for row in rows_of(section)}


def test_row_says_yes_only_if_all_its_tests_pass(monkeypatch):
    """Passed, failed, untested and refused rows have their own verdicts."""
    rows = [support_table.Row(name, "") for name in ("good", "bad", "bare")]
    rows.append(support_table.Row("never", "", "reasons"))
    monkeypatch.setattr(support_table, "rows_of", lambda section: rows)
    outcomes = Outcomes()
    outcomes.passed |= {"good": 3, "bad": 1}
    outcomes.failed |= {"bad": ["a test"]}
    text = rewritten("before\n<!-- families -->\nold\n<!-- end -->\nafter\n", outcomes)
    assert re.findall(r"`(\w+)` \| ([^|]+) \|", text) == [
        ("good", "yes (3 tests)"),
        ("bad", "no: 1 of 2 tests failed"),
        ("bare", "no: nothing tests it"),
        ("never", "no: reasons"),
    ]
    assert text.startswith("before\n<!-- families -->\n| Family")
    assert text.endswith("<!-- end -->\nafter\n")


def test_outcomes_count_for_the_covered_rows(tmp_path: Path):
    """A passed test counts for its rows, a failure or skip against them, and an unmarked test does not run."""
    (tmp_path / "conftest.py").write_text(
        "def pytest_configure(config):\n    config.addinivalue_line('markers', 'covers(row): x')\n"
    )
    (tmp_path / "test_rows.py").write_text(
        "import pytest\n"
        "@pytest.mark.covers('one')\ndef test_a(): pass\n"
        "@pytest.mark.covers('one', 'two')\ndef test_b(): pass\n"
        "@pytest.mark.covers('two')\ndef test_c(): assert False\n"
        "@pytest.mark.covers('three')\ndef test_d(): pytest.skip('not here')\n"
        "def test_e(): raise SystemExit\n"
    )
    outcomes = Outcomes()
    arguments = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)]
    pytest.main(arguments, plugins=[outcomes])
    assert dict(outcomes.passed) == {"one": 2, "two": 1}
    assert {name: len(tests) for name, tests in outcomes.failed.items()} == {"two": 1, "three": 1}
