"""What compare_trainers.py compares with.

reference_trainers  transformers' Trainer with a KL loss, and TRL's GKDTrainer
plain_eagle3        EAGLE-3's training-time test as public trainers compute it
step_timer          clock of the steps of any trainer

May import decode and train.
"""
