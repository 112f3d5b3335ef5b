"""Mirror speculative decoding: the next proposal is drafted while the target verifies the last one.

branches       continuations of several possible outcomes of a verification, drafted together as one token tree
overlap_counts how often they were used, and how much of the time for drafting lay beside the target's
mirror_draft   `MirrorDraft`, which drafts branches in a second thread while a small LM's target is in its upper layers
"""
