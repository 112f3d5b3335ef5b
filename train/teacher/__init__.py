"""The target's hidden states and logits for a batch of samples."""
