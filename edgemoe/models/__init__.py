"""Opens a model by its name: an open store with a memory plan."""
