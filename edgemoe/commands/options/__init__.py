"""How commands take their options."""
