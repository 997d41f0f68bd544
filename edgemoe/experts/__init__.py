"""One MoE layer: which rows each expert computes, and their sum."""
