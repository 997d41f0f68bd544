"""docs/serving.md names every endpoint that the server has."""

from __future__ import annotations

import re
from pathlib import Path

from edgemoe.serve.app import protocols_of, routes_of
from edgemoe.serve.models import models_of
from edgemoe.serve.slot import Source

PAGE = (Path(__file__).resolve().parents[3] / "docs/serving.md").read_text(encoding="utf-8")


def test_every_endpoint_is_on_the_page():
    """Its table has the paths of the application."""
    models = models_of({"x": Source(lambda opened: None)}, 1)
    routes = routes_of(models, protocols_of(models))
    paths = {route.path.replace("{name:path}", "NAME") for route in routes}
    table = PAGE[PAGE.index("## Endpoints") : PAGE.index("Refused by name")]
    named = set(re.findall(r"(/[\w./]*)[`,]", table))
    assert named == paths
