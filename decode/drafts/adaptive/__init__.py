"""Chains whose length is set while decoding, for any draft of chains.

controller     a row's running acceptance, what rounds cost, and the draft length that they make fastest
adaptive_draft `AdaptiveDraft`, which ends the chains of another draft by confidence, by acceptance, or by both
"""
