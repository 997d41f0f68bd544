"""How experts come into memory in time: transfers between the disk and the tiers."""
