"""Draft families: what proposes tokens for the target to verify.

base           `Draft`, the interface to the engine; `Proposal`; metadata of a saved draft
registry       the families by name, loading and creation
drafting       chains, static trees and dynamic trees from one step of a model
causal         a small language model
medusa         Medusa heads
eagle          EAGLE-1 and EAGLE-3 heads; eagle_model has their networks
blocks         drafts that propose a block in one pass: PARD, P-EAGLE, DFlash, DSpark; dflash_model has their network
mtp            native multi-token prediction layers
early_exit     the target's first layers, as they are or with a trained exit adapter
swift          the target without some sub-layers; swift_search looks for these
lookup         drafts without a model: prompt lookup, SuffixDecoding on a suffix_tree, tokens that a grammar forces
mirror         chains of a small LM that are drafted while the target verifies (Mirror-SD), on branches
settings       what commands can be told of these drafts; decode/generate.py's own settings
wrappers       drafts on another device, with a lookup in front, with chains that end by confidence, with a record

May import decode.common, decode.model, decode.verification, decode.constraints and decode.checkpoints.
"""
