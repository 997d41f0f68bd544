"""docs/serving.md names what the server has: every option of its command, and every endpoint."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main
from starlette.routing import Route

from edgemoe.cli import app
from edgemoe.serve.app import make_app
from edgemoe.serve.guard import Access
from edgemoe.serve.refused import REFUSED
from edgemoe.serve.serving import Serving

PAGE = (Path(__file__).resolve().parents[3] / "docs/serving.md").read_text(encoding="utf-8")


def test_every_option_is_on_the_page():
    """Those of `serve --help`, each as a whole word."""
    command = typer.main.get_command(app).commands["serve"]
    options = {name for param in command.params for name in param.opts if name.startswith("--")}
    assert len(options) > 40
    named = set(re.findall(r"--[a-z-]+", PAGE))
    assert options - named == set()


def test_every_endpoint_is_on_the_page():
    """Paths with their methods are those of the application; the refused ones are refused."""
    routes = make_app(Serving("x", most=1), Access())._app.routes
    paths = {route.path.replace("{name:path}", "NAME") for route in routes if isinstance(route, Route)}
    table = PAGE[PAGE.index("## Endpoints") : PAGE.index("Refused by name")]
    named = set(re.findall(r"(/[\w./]*)[`,]", table))
    assert named == paths - REFUSED.keys()
