"""From prompt sources to training batches."""
