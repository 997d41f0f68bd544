"""The process that renders chat templates: a script that imports neither edgemoe nor torch.

Reads requests on stdin and writes answers on stdout, one JSON object per line. The operating system kills a template
that computes too long; a template that takes too much memory gets a MemoryError. The parent reports both.

The environment is as in transformers' `apply_chat_template`: the same sandbox, filters and functions.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY_BYTES = 512 << 20
"""Address space of this process, Python's own included."""


class GenerationBlocks(Extension):
    """`{% generation %}`, which marks training text; renders its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses the body into a scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class GuardedNamespace(Namespace):
    """jinja2's namespace, without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:  # a template may use the name `self`
        self, *rest = args
        checked = dict(*rest, **values)
        for name in checked:
            _check_name(name)
        Namespace.__init__(self, checked)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace may not contain {name!r}")


def _raise(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=4)
def compiled(template: str) -> Template:
    """Compiles a template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": GuardedNamespace,
    }
    return environment.from_string(template)


def render(template: str, variables: Mapping[str, Any], limit: int) -> dict[str, str]:
    """Renders a template.

    Args:
        template: jinja2 source.
        variables: the variables of the template.
        limit: maximum characters of output.

    Returns:
        `text`, or `error` with `kind`: refused (by the template itself), limit or broken.
    """
    try:
        pieces, length = [], 0
        for piece in compiled(template).generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > limit:
                return {"kind": "limit", "error": f"more than {limit} characters"}
        text = "".join(pieces)
        text.encode()
    except MemoryError:
        return {"kind": "limit", "error": f"more than {MEMORY_BYTES >> 20} MiB of memory"}
    except TemplateError as error:
        kind = "refused" if type(error) is TemplateError else "broken"
        return {"kind": kind, "error": f"{error.message}"}
    except Exception as error:
        return {"kind": "broken", "error": f"{type(error).__name__}: {error}"}
    return {"text": text}


def render_first(
    template: str, variables: Mapping[str, Any], forms: Sequence[Sequence[Mapping[str, Any]]], limit: int
) -> dict[str, str]:
    """Renders a conversation in the first form that the template takes.

    Args:
        template: jinja2 source.
        limit: maximum characters of output.
        variables: variables of the template except `messages`.
        forms: the conversation's forms, one or more.

    Returns:
        as render; the error of the first form where the template takes none.
    """
    first: dict[str, str] = {}
    for messages in forms:
        answer = render(template, {**variables, "messages": messages}, limit)
        first = first or answer
        if "text" in answer or answer["kind"] == "limit":
            return answer
    return first


def main() -> None:
    """Answers requests until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most_seconds = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = math.ceil(used.ru_utime + used.ru_stime + request["seconds"])
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, most_seconds))
        answer = render_first(request["template"], request["variables"], request["forms"], request["most"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
