"""How a memory limit is divided, and the tiers that follow from it."""
