"""edgemoe's own CPU kernels, written in C."""
