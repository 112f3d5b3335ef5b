"""The checks of train/doctor.py: what is wrong with samples or prompts, what it costs, what mends it."""
