"""The contract of protocols, and what all of them share: how answers go out, and log probabilities."""
