"""Constrained decoding: a grammar says which tokens may follow a text, for the target and the draft alike."""
