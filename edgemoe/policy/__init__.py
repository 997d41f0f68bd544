"""The papers: which experts matter, and how many bits each gets. Pure functions and small classes without I/O."""
