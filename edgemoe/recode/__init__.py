"""Codes of a store chosen again, with error feedback on sampled inputs of the experts."""
