"""A conversation at a terminal: templates, turns, slash commands, saved transcripts."""
