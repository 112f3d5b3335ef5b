"""Verification: which drafted tokens the target accepts, as pure functions of tensors.

sampling   temperature, top-k and top-p, and random numbers that do not depend on the batch
tree       shapes of token trees, and functions of their parents
rules      the verification rules for chains and trees
registry   the rules by name: `register_rule` adds one

May import decode.common only, of the project.
"""
