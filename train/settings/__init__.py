"""The settings of training and of its data, below everything that uses them.

    data.py        sources, filters, sampled sets, the server of a target's states; train/doctor.py
    training.py    losses, the loop, measurements and publishing, the parts of train/distill.py's settings

Those of each draft family are in train/families/settings/, and DistillConfig, which has all of them, in
train/trainer/settings.py. Nothing here imports torch: commands say their --help at once.
"""
