"""Constrained decoding: a grammar says which tokens may follow a text, for the target and the draft alike.

matcher      `Matcher`, the place of one text in its grammar
grammar      matchers of a JSON schema, a regular expression or a Lark grammar, by llguidance
rows         the matchers of a batch's rows: masks along drafted chains, forced tokens, what was committed

May import decode.common, decode.model and decode.verification.
"""
