"""Draft checkpoints on disk, in the formats of the serving engines.

- layouts: Layout, the description of how a family is stored, and how files of any layout are written, read and loaded
- eagle_layouts, block_layouts, head_layouts: the layouts of EAGLE; of DFlash and DSpark; of Medusa, exit adapters, MTP
- draft_folder: the files of a saved draft, and draftsmith.json, which says how it was made
- draft_vocab: the tokens that a small language model with a reduced output vocabulary can draft, and its rows of logits
- eight_bit: weights in eight bits or fewer as the numbers that they stand for
- importers: LAYOUTS by family; checkpoints of any project read under the names of our modules

It imports decode.common and decode.model.
"""
