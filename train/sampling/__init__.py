"""Writing a sampled set: who answers the prompts, and how conversations become rows."""
