"""Verification: which drafted tokens the target accepts, as pure functions of tensors."""
