"""Targets that one device cannot hold: split over the processes of a launch, or over devices, memory and disk.

- placement: the settings, and the target that they give
- layer_map: which layers are on which device, in memory or on disk
- tensor_parallel: the model of which each process holds a slice of every layer
- leader: the process that runs the command and tells the others what to compute
- follower: what those others do

layer_map, tensor_parallel <- leader, follower <- placement; of decode only common and model are imported.
"""
