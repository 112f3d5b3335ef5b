"""Training of drafts by distillation from the target."""
