"""edgemoe runs Mixture-of-Experts language models whose experts do not fit in memory.

The program's other three packages, `prefetch`, `cache` and `storage`, lie beside this one under names that
anyone may have used as well. Importing edgemoe therefore first makes sure that they are its own.
"""

from importlib.util import find_spec
from pathlib import Path

__version__ = "0.1.0"

_SIBLINGS = ("prefetch", "cache", "storage")


def _check_siblings() -> None:
    """Compares where Python would import each sibling from with where it must lie; imports none of them.

    Raises:
        ImportError: a sibling is missing, or something else of its name comes first on the import path.
    """
    for name in _SIBLINGS:
        expected = Path(__file__).resolve().parent.parent / name
        spec = find_spec(name)
        places = (spec.submodule_search_locations or [spec.origin or "built-in"]) if spec else []
        if [Path(place).resolve() for place in places] != [expected]:
            found = ", ".join(places) or "nothing"
            raise ImportError(
                f"edgemoe needs its own package {name!r} at {expected}: Python finds {found} instead. "
                f"Rename or remove what is found, or take its directory off PYTHONPATH and start elsewhere; "
                f"if nothing is found, install edgemoe again"
            )


_check_siblings()
