"""Converts the model that a user names: on disk or from the Hub, once, and announced."""
