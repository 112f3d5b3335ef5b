"""Draft families in training: a family is a class of settings, and what makes a TrainableDraft of it."""
