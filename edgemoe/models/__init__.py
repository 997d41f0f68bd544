"""From the name of a model to an opened store."""
