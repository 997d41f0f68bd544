"""What a sequence keeps between steps: keys and values, or the state of linear attention."""
