"""What a training run is going to need, before it starts.

    resources.py  memory, disk and operations from model sizes
    estimates.py  these for the settings of train/distill.py, as a table; operations of each step for MFU
    dry_run.py    two steps on the real models, and saving and loading the draft

May import decode and the other packages of train but hub.
"""
