"""Input from and output to a terminal."""
