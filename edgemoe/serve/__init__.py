"""The HTTP server: OpenAI's and Anthropic's interface on the Python API. A request takes one path, from top to bottom:

guard (host, origin, key) -> app (routes) -> fields (validated) -> job (submitted) -> replies (shapes) -> responses
(JSON or a stream). Between app and fields, `protocols` translates what is not OpenAI's; it has replies of its own.
"""
