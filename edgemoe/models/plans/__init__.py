"""The division of limits for the model that a user names, and what it refuses."""
