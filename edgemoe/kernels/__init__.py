"""Kernels: what is computed from an expert's blocks, one module per device."""
