"""Kernels for GPUs, written in Triton."""
