"""What the operating system and the devices say about this machine."""
