"""Causal LMs with recurrent layers (Mamba, gated delta rule, short convolutions), alone or beside attention.

- hybrid_cache: the cache of such a model: K/V buffers, and one recurrent state a row
- recurrent_runner: `RecurrentRunner`, the ModelRunner of such a model

A state is a sum over all tokens that were read, from which rejected ones cannot be taken out. So a step of more than
one token begins with a copy of all states; the next step restores those of the rows in which tokens were rejected and
reads the accepted ones again. Nothing outside this folder has to know it: the `base` of the next step says what was
accepted.

It imports decode.common and the modules of decode.model but for loading and encoder_decoder.
"""
