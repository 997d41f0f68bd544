"""Measured speeds: of the disk, of the link to a device, and of each memory tier of an open model."""
