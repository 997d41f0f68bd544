"""Stores with a real model's shapes and random weights, to measure speed on without a download."""
