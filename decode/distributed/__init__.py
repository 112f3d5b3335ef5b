"""Targets that one device cannot hold: split over processes, or over devices, memory and disk."""
