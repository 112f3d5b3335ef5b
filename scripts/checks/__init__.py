"""Checks of sampled sets and of the machine.

compare_samples.py  tests whether two sampled sets of the same prompts follow one law (command)
fastest_dtype.py    prints the dtype in which this machine multiplies fastest (command; scripts/env.sh asks it)

May import decode, eval and train.
"""
