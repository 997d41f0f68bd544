"""Tiers of fixed-size blocks that keep experts in memory, their eviction, and the budget that limits them."""
