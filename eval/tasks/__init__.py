"""Prompt sets as token ids."""
