"""OpenAI's responses, over the chats of the server. Nothing is stored: the client sends all items each time."""
