"""What a machine computes on."""
