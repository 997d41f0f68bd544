"""Anthropic's messages, over the chats of the server."""
