"""How memory limits are divided, and the tiers allocated from them."""
