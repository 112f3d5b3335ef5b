"""From prompt sources to training batches, in this order:

    sources.py          reads Prompts of bundled files, Python's standard library, files, Hub data sets, up to a limit
    python_corpus.py    Python's standard library as text, with the held-out modules
    conversations.py    a Prompt; Prompt -> Conversation: token ids of prompts and replies, turn by turn
    template_probe.py   what a chat template does, found by rendering; texts that were rendered already
    filters.py          finds prompts that overlap evaluation, near duplicates and wrong lengths
    prompt_pipeline.py  runs these steps for train/sample.py and counts what each of them dropped
    sample_store.py     the rows of a sampled set on disk: parquet shards
    manifest.py         how a set was made and which shards it has; damaged sets are refused or mended
    mixture.py          several sampled sets mixed by weight, in the order in which steps take rows
    vocab_mapping.py    the reduced draft vocabulary: which token ids a draft's columns stand for
    batching.py         rows of a step -> padded or packed Batch with its loss mask

May import decode and eval; of train only train.settings and its own modules.
"""
