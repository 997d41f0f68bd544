"""Reports of the operating system, the CPU and the devices about this machine, and the advice they accept."""
