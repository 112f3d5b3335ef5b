"""What a machine computes on.

- choice: the device that a command runs on; why torch cannot use the NVIDIA GPU of a machine, and what to change

Of decode only common is imported.
"""
