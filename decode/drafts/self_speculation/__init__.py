"""Drafts that are parts of the target itself.

early_exit     the target's first layers, as they are or with a trained exit adapter
exit_adapter   that adapter: a block between the first layers and the LM head
swift          the target without some of its sub-layers
swift_search   the search for these sub-layers
sublayers      models without some sub-layers
"""
