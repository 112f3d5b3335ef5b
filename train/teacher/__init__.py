"""The target's hidden states and logits for a batch of samples.

    live.py                the target runs at every step
    served.py              a server runs the target and gives its hidden states
    answer_states.py       the decoder's states of an encoder-decoder, where a causal LM has them
    cached.py              hidden states and distributions are read from disk; the target ran once
    feature_codec.py       tensors of a token on disk: fp8 states with scales, top-K distributions
    feature_store.py       the folder of feature shards: which samples are where, checksums, lock
    feature_extraction.py  the pass of the target over the samples that writes missing shards

May import decode, eval, train.settings, train.data and train.losses.
"""
