"""Kernels: the products computed from an expert's blocks, one module per device."""
