"""The decoding loop: rounds of drafting and verification, by compiled code and CUDA graphs too."""
