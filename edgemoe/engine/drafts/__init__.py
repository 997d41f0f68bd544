"""Guesses at the next tokens of an answer (drafts), which one step checks together (docs/decisions/0063)."""
