"""Targets that one device cannot hold: split over the processes of a launch, or over devices, memory and disk.

- placement: the settings, which layers are on which device, in memory or on disk, and the target that they give
- tensor_parallel: the model of which each process holds a slice of every layer
- passes: the process that runs the command and tells the others what to compute, and what those others do

tensor_parallel <- passes <- placement; of decode only common, devices and model are imported.
"""
