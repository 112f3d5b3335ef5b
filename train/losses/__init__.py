"""Losses between the target distribution p and the draft distribution q."""
