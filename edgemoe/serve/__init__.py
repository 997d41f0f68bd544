"""The HTTP server: interfaces of OpenAI, Anthropic and ollama on the API. A request takes one path, top to bottom:

guard (host, origin, key) -> app (routes) -> fields (validated) -> job (submitted) -> replies (shapes) -> responses
(JSON or a stream). Between app and fields, `protocols` translates what is no chat or completion of OpenAI's; it has
replies of its own.
"""
