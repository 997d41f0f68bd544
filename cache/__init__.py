"""Which experts stay in memory: tiers of fixed-size blocks, their eviction, and the budget they live on."""
