"""Finds the fastest draft length, tree and batch size of each method."""
