"""An open model for Python programs, and for chat and bench: answers, streams, futures and scores."""
