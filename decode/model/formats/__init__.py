"""Forms of stored weights that transformers does not load as they are; each becomes a plain folder in the cache."""
