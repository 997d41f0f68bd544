"""The HTTP server: OpenAI's interface on the Python API. A request takes one path, from top to bottom:

guard (host, origin, key) -> app (routes) -> fields (validated) -> job (submitted) -> replies (shapes) -> responses
(JSON or server-sent events).
"""
