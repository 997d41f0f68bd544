"""Export of a store to checkpoints of other engines."""
