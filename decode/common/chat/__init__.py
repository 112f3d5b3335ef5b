"""Chat templates: which one renders a target's prompts, what it renders, and what rendering shows of it."""
