"""What a request asks of the model: a chat or a completion, checked, whatever protocol it came in."""
