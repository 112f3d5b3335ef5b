"""Draft families: what proposes tokens for the target to verify.

base           `Draft`, the interface to the engine; `Proposal`; metadata of a saved draft
registry       the families by name, loading and creation
drafting       chains, static trees and dynamic trees from one step of a model
causal         a small language model; recurrent_draft is that of one with recurrent layers
medusa         Medusa heads
eagle          EAGLE-1 and EAGLE-3 heads; eagle_model has their networks
blocks/        drafts that propose a block in one pass: PARD, P-EAGLE, DFlash, DSpark
mtp            native multi-token prediction layers; mtp_model has their network
adaptive/      chains whose length follows the draft's confidence or a row's acceptance, for any draft of chains
self_speculation/  parts of the target: its first layers, as they are or with a trained exit; all but some sub-layers
mirror/        chains of a small LM that are drafted while the target verifies (Mirror-SD)
lookups/       drafts without a model: prompt lookup, SuffixDecoding, tokens that a grammar forces
wrappers       drafts on another device, drafts with a lookup in front, and drafts whose proposals are recorded

May import decode.common, decode.model, decode.verification, decode.constraints and decode.checkpoints.
"""
