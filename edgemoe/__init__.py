"""edgemoe runs Mixture-of-Experts language models whose experts do not fit in memory.

The program's other three packages, `prefetch`, `cache` and `storage`, lie beside this one, under names that other
projects may use too. Importing edgemoe therefore first checks that Python would import its own.
"""

from importlib.util import find_spec
from pathlib import Path

__version__ = "0.1.0"

_SIBLINGS = ("prefetch", "cache", "storage")


def _check_siblings() -> None:
    """Checks the place from which Python would import each sibling; imports none of them.

    Raises:
        ImportError: a sibling is missing, or another package of its name comes first on the import path.
    """
    for name in _SIBLINGS:
        expected = Path(__file__).resolve().parent.parent / name
        spec = find_spec(name)
        places = (spec.submodule_search_locations or [spec.origin or "built-in"]) if spec else []
        if [Path(place).resolve() for place in places] != [expected]:
            found = ", ".join(places) or "nothing"
            raise ImportError(
                f"edgemoe needs its own package {name!r} at {expected}: Python finds {found} instead. "
                "rename or remove the package found, or take its directory off PYTHONPATH and start elsewhere; "
                "if it finds nothing, install edgemoe again"
            )


_check_siblings()
