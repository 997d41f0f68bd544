"""Measures on a text what fewer bits of each expert cost, by steps of the engine."""
