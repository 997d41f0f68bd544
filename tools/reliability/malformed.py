"""Malformed HTTP requests: wrong JSON for every field, with big parts too, and bytes that are no HTTP."""

from __future__ import annotations

import json
import socket
from random import Random
from typing import Any

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "x",
        "messages": [{"role": "user", "content": "fox"}],
        "max_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 1,
        "stream": False,
        "stop": ["x"],
        "logprobs": True,
        "top_logprobs": 1,
        "logit_bias": {"5": 1},
        "seed": 1,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"a": 1},
    },
    "/v1/completions": {
        "prompt": "fox",
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
        "min_p": 0.1,
        "top_k": 3,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "return_progress": True,
    },
    "/v1/messages": {
        "model": "x",
        "max_tokens": 1,
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "fox", "cache_control": {"type": "ephemeral"}}],
            },
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": ""}]},
            {"role": "user", "content": "fox"},
        ],
        "system": [{"type": "text", "text": "x"}],
        "stop_sequences": ["x"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stream": False,
        "thinking": {"type": "disabled"},
        "tool_choice": {"type": "none"},
        "tools": [{"name": "x", "input_schema": {"type": "object"}}],
        "output_config": {"effort": "low"},
        "metadata": {"user_id": "x"},
    },
    "/v1/messages/count_tokens": {
        "model": "x",
        "messages": [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]}
        ],
    },
    "/v1/responses": {
        "model": "x",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "fox"}]}],
        "instructions": "x",
        "max_output_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "stream": False,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "metadata": {"a": "x"},
    },
    "/api/chat": {
        "model": "x",
        "messages": [{"role": "user", "content": "fox"}],
        "stream": False,
        "think": False,
        "keep_alive": "5m",
        "options": {"num_predict": 1, "temperature": 0.5, "top_k": 3, "stop": ["x"], "seed": 1},
    },
    "/api/generate": {
        "model": "x",
        "prompt": "fox",
        "system": "x",
        "stream": False,
        "options": {"num_predict": 1, "min_p": 0.1},
    },
    "/tokenize": {"prompt": "fox", "add_special_tokens": True},
    "/detokenize": {"tokens": [5, 6]},
}
"""Path -> a body that the endpoint takes."""

_SCALARS: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**64), 10**30, 0.5, -0.5, 1e308, 1e-308),
    *("", "x", "\x00", "é", "\U0001f642", "a" * 5000, "NaN", "-1", "%s%n", "../../etc/passwd", "<script>"),
)


_SCHEMAS = 0.05
"""Share of the chats with big parts whose big part is a schema."""


def a_value(random: Random, depth: int = 0) -> Any:
    """A random JSON value."""
    kind = random.randrange(10)
    if kind < 7 or depth > 3:
        return random.choice(_SCALARS)
    if kind < 9:
        return [a_value(random, depth + 1) for _ in range(random.choice((0, 1, 2, 5, 70)))]
    return {str(random.choice(_SCALARS)): a_value(random, depth + 1) for _ in range(random.randrange(4))}


def a_big_value(random: Random) -> str:
    """The JSON text of a value that is deep, wide, long, or a number of many digits."""
    many = int(10 ** random.uniform(1, 5.3))
    part = random.choice(('"a"', "1", "null", "[]", "{}", '{"a":1}', '{"role":"user","content":"x"}', "1.5"))
    shapes = (
        lambda: "[" * many + "]" * many,
        lambda: '{"a":' * many + part + "}" * many,
        lambda: "[" + f"{part}," * many + part + "]",
        lambda: '["a"' + f",{part}" * many + "]",
        lambda: "{" + ",".join(f'"{i}":{part}' for i in range(many)) + "}",
        lambda: json.dumps(
            random.choice(("x", "fox ", "\n", "\x00", "é", "\U0001f642", " ", "1")) * many * 8
        ),
        lambda: "-" * random.randrange(2) + "9" * many,
        lambda: f"1e{'9' * min(many, 5000)}",
        lambda: "0." + "0" * many + "1",
    )
    return random.choice(shapes)()


def a_schema(random: Random) -> dict[str, Any]:
    """A JSON schema that may take long to compile, or to follow."""
    many, more = random.randint(2, 40), int(10 ** random.uniform(1, 5))
    text = {"type": "string"}
    schemas: tuple[dict[str, Any], ...] = (
        {"allOf": [text | {"pattern": f".*a.{{{i * 10}}}b.*"} for i in range(1, many)]},
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(8)]} for i in range(many)
            ]
        },
        text | {"pattern": f"^((a|b){{1,{more}}}c){{1,{more}}}$"},
        text | {"minLength": more, "maxLength": more * 100},
        {"enum": [f"{i}x" for i in range(more)]},
        {"properties": {f"p{i}": {"type": "null"} for i in range(more // 10)}},
        {"type": "array", "minItems": more, "items": {"type": "array", "minItems": more}},
        {"patternProperties": {f".*a.{{{i}}}b.*": text for i in range(many)}},
        {"type": "number", "multipleOf": 1 / more, "maximum": 10**15},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * many}}, "$ref": "#/$defs/a"},
    )
    return random.choice(schemas)


def a_form(random: Random) -> dict[str, Any]:
    """A field with a form of answers that may take long: mostly a schema, else a regular expression or many texts."""
    many, kind = int(10 ** random.uniform(1, 5)), random.randrange(8)
    if kind == 0:
        return {"guided_choice": [f"{i}x" for i in range(many)]}
    if kind == 1:
        patterns = (f".*a.{{{many}}}b.*", f"((a|b){{1,{many}}}c){{1,{many}}}", "(a|" * many, "[^/]" * many)
        return {"guided_regex": random.choice(patterns)}
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": a_schema(random)}}
    }


def a_body(random: Random) -> tuple[str, bytes]:
    """A path, and a body with some fields replaced, left out or cut."""
    path = random.choice([*GOOD])
    body: Any = dict(GOOD[path])
    for _ in range(random.randint(1, 3)):
        name = random.choice([*body, "extra"]) if body else "extra"
        body.pop(name, None) if random.random() < 0.2 else body.update({name: a_value(random)})
    if random.random() < 0.1:
        body = a_value(random)
    text = json.dumps(body, ensure_ascii=random.random() < 0.5)
    raw = text.encode("utf-8", "surrogatepass")
    kind = random.randrange(8)
    if kind == 0:
        raw = raw[: random.randrange(len(raw) + 1)]
    elif kind == 1:
        raw = bytes(b ^ (1 << random.randrange(8)) if random.random() < 0.05 else b for b in raw)
    elif kind == 2:
        raw = text.encode(random.choice(("utf-16", "utf-32", "utf-7")), "replace")
    elif kind == 3:
        raw = random.choice(
            (b"[" * 20000, b'{"a":' * 5000, b'{"prompt": NaN}', b"\xef\xbb\xbf" + raw, b"1e999")
        )
    return path, raw


def a_big_body(random: Random) -> tuple[str, bytes]:
    """A path, and a body with a big part in a field, in a list of one, or in its place."""
    path = random.choice([*GOOD])
    body: dict[str, Any] = dict(GOOD[path])
    if path == "/v1/chat/completions" and random.random() < _SCHEMAS:
        return path, json.dumps(body | a_form(random)).encode()
    name, place = random.choice([*body, "extra"]), "the big part"
    body[name] = random.choice((place, place, [place], [{"role": "user", "content": place}], {"a": place}))
    text = json.dumps(body).replace(json.dumps(place), a_big_value(random))
    return path, text.encode()


def a_request(random: Random) -> bytes:
    """The bytes of a request, most of them no HTTP, or not whole."""
    path, body = a_body(random)
    length = random.choice((len(body), len(body), 0, len(body) + 9, -1, "x", 10**20, ""))
    head = [
        f"{random.choice(('POST', 'GET', 'PUT', 'BREW', 'po st', 'OPTIONS', 'HEAD', 'CONNECT'))} "
        f"{random.choice((path, path, '/', '/' + 'a' * 9000, '*', '//', '/%00', '/v1/../metrics', 'http:' + '//x/'))} "
        f"{random.choice(('HTTP/1.1', 'HTTP/1.1', 'HTTP/1.0', 'HTTP/9.9', 'HTP', ''))}",
        f"Host: {random.choice(('localhost', 'localhost', 'evil.example', '', 'a b', '[::1', '127.0.0.1:99999999'))}",
        f"Content-Length: {length}",
    ]
    more = (
        *("Transfer-Encoding: chunked", "Connection: close", "Connection: upgrade\r\nUpgrade: websocket"),
        *(
            "Origin: null",
            "Authorization: Bearer",
            "Content-Type: text/plain; charset=utf-16",
            "Expect: 100-continue",
        ),
        *(
            "Content-Length: 3",
            "X: " + "y" * 70000,
            "bad header",
            ": empty",
            "X: \x00",
            "Content-Encoding: gzip",
        ),
    )
    head += random.sample(more, random.randrange(3))
    raw = "\r\n".join([*head, "", ""]).encode("utf-8", "surrogatepass") + body
    if random.random() < 0.3:
        raw = raw[: random.randrange(len(raw))]
    if random.random() < 0.1:
        raw = random.randbytes(random.randrange(2000))
    return raw


def exchange(port: int, raw: bytes, *, patience: float = 10.0) -> int | None:
    """Sends bytes, ends the sending side, and reads to the end.

    Returns:
        the status of the first response; None: the server closed the connection without one.

    Raises:
        TimeoutError: neither a response nor an end came.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=patience) as connection:
        found = b""
        try:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                found += part
        except OSError as error:  # it was closed before all was sent
            if isinstance(error, TimeoutError):
                raise
    words = found.split(b" ", 2)
    return int(words[1]) if len(words) > 2 and words[0].startswith(b"HTTP/") else None
