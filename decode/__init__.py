"""Speculative decoding: text of a target model, produced faster with the help of a draft.

- common: command lines, files, errors, progress
- devices: the device that a command runs on
- model: transformers models in fixed shapes
- distributed: targets larger than one device
- verification: sampling, token trees and acceptance rules
- constraints: grammars that say which tokens may come next
- checkpoints: draft checkpoints on disk
- drafts: the draft families
- engine: rounds of drafting and verification, compiled code and CUDA graphs
- serving: what other engines load, serve and log; engines that run
- generate.py: the command that continues one prompt; continuation.py does it
- build_wheel.py: what an install takes besides the packages, assets/ and configs/

common <- devices <- model; common <- verification; model, verification <- constraints, checkpoints <- drafts <- engine
<- generate.py, serving; model <- distributed <- generate.py; nothing outside decode is imported.
"""
