"""What a training run is going to need, before it starts.

    shape_run.py  a step on tensors without data: the memory it holds, the operations it takes
    resources.py  what a run needs besides: disk, and the operations of text that the draft writes
    estimates.py  these for the settings of train/distill.py, as a table; operations of each step for MFU
    dry_run.py    two steps on the real models, and saving and loading the draft

May import decode and the other packages of train but sampling, doctor_checks and hub.
"""
