"""Files: read past the page cache with retries, written atomically, locked, and checked when they come from outside."""
