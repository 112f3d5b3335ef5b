"""Decodes the prompts of tasks with several methods and times them."""
