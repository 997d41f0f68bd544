"""Models of the Hugging Face Hub, downloaded and converted shard by shard."""
