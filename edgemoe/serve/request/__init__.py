"""The chat or completion that a request means, checked, whatever protocol it came in."""
