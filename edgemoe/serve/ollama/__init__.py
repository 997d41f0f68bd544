"""Ollama's chats and texts, over the chats of the server, and its description of the one model."""
