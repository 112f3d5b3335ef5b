"""Constrained decoding: a grammar says which tokens may follow a text, for the target and the draft alike.

grammar      `Matcher`, the position of one text in its grammar, and the matchers of a JSON schema, a regular expression
             or a Lark grammar, by llguidance
rows         the matchers of a batch's rows: masks along drafted chains, forced tokens, what was committed

May import decode.common, decode.model and decode.verification.
"""
