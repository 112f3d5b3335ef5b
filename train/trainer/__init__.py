"""The training loop and what it needs around each step."""
