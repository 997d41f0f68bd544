"""Models of the Hugging Face Hub, converted shard by shard."""
