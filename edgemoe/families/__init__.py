"""The model families that edgemoe runs."""
