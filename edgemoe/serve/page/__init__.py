"""The server's own endpoints: its page, and the figures that the page shows."""
