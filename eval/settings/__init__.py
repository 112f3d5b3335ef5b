"""The settings of commands that measure; nothing here imports torch, so that they say their --help at once."""
