"""The study of low-rank compensators: how many of a token's experts, which ones, and by which factors."""
