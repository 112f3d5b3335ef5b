"""Measures drafts: acceptance, speed-up, losslessness, and what to do about the result."""
