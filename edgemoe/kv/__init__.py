"""State of a sequence between steps: keys and values, or the state of linear attention."""
