"""Draft checkpoints on disk, in the formats of the serving engines.

- layouts: config.json and tensor names as this project writes them
- draft_folder: the files of a saved draft, and draftsmith.json, which says how it was made
- draft_vocab: the tokens that a small language model with a reduced output vocabulary can draft, and its rows of logits
- eight_bit: weights in eight bits or fewer as the numbers that they stand for
- importers: checkpoints of other projects, and of this one, read under the names of our modules

It imports decode.common and decode.model.
"""
