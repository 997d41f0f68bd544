"""From a model's name to an open store with a memory plan."""
