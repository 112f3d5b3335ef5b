"""Linear layers in few bits, in place of those of a loaded model or draft."""
