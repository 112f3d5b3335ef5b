"""The settings of training and of its data, below everything that uses them; nothing here imports torch."""
