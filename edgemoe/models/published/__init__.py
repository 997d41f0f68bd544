"""Models that can be planned without their files: their sizes are written here, by hand."""
