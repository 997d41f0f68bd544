"""What the operating system, the CPU and the devices report about this machine, and the advice they accept."""
