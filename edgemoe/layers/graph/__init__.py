"""New tokens on a device, by captured launches."""
