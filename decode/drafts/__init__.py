"""Draft families: what proposes tokens for the target to verify."""
