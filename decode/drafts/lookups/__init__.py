"""Drafts without a model: what follows an earlier occurrence of the last tokens.

ngram          prompt lookup
suffix         SuffixDecoding
suffix_tree    its data structure
grammar        nothing but the tokens that a grammar forces
"""
