"""What scripts/benchmarks/floor.py times.

products.py  the matrix products of a model's linear layers, by several kernels
batches.py   vocabulary work, a pass of features, a step of training

May import decode, eval and train.
"""
