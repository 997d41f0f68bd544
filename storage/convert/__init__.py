"""Conversion of a checkpoint to a store."""
