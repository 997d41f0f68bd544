"""How experts lie on disk and in memory: record format, conversion, readers and writers. Knows no tokens."""
