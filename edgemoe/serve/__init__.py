"""The HTTP server: protocols of OpenAI, Anthropic and ollama on the API. A request takes one path:

guard (host, origin, key) -> app (routes) -> a protocol's fields (validated) -> models (the model that they name,
once it is loaded) -> request (the chat or completion that they mean) -> serving and job (submitted) -> the
protocol's reply (shapes) -> protocol.sending (JSON or a stream).

Imports point one way: server, app, the protocols and the server's own pages, `protocol` (their contract), models, slot,
serving, job, request, errors. tests/test_imports.py has the order.
"""
