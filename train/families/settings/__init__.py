"""The settings of each trained family; nothing here imports torch when it is loaded."""
