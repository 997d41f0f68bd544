"""Low-rank compensators of a store's experts: how they are made, their files, and their reader."""
