"""Lines of code of the four packages, without docstrings, comments and blank lines: `python -m tools.count_code`."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

PACKAGES = ("edgemoe", "prefetch", "cache", "storage")

_IGNORED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}

_C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def python_lines(source: str) -> int:
    """Lines of a Python module that hold code. A statement that is only a string is a docstring."""
    text = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _IGNORED:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - text)


def c_lines(source: str) -> int:
    """Lines of a C file that hold code."""
    bare = _C_COMMENT.sub(lambda match: "\n" * match[0].count("\n"), source)
    return sum(bool(line.strip()) for line in bare.splitlines())


def count(root: Path) -> dict[str, int]:
    """Package -> lines of code, C included."""
    return {
        package: sum(
            python_lines(path.read_text(encoding="utf-8")) for path in (root / package).rglob("*.py")
        )
        + sum(c_lines(path.read_text(encoding="utf-8")) for path in (root / package).rglob("*.[ch]"))
        for package in PACKAGES
    }


def main(arguments: list[str]) -> int:
    """Prints a line for each package of a checkout (the current folder, or the one given), and the sum."""
    counts = count(Path(arguments[0] if arguments else "."))
    for package, lines in (*counts.items(), ("all", sum(counts.values()))):
        print(f"{package:>10} {lines:7,}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
