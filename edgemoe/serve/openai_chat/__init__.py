"""OpenAI's chats and completions, and the endpoints that its clients expect next to them."""
