"""From prompt sources to training batches, in this order:

    sources.py          reads raw contents: bundled prompts, Python's standard library, files, Hub data sets
    python_corpus.py    Python's standard library as text, with the held-out modules
    prompts.py          contents -> Prompts: ids from content hashes, limits, exact duplicates dropped
    conversations.py    Prompt -> Conversation: token ids of prompts and replies, turn by turn
    rendered_text.py    texts that were rendered with a chat template already
    filters.py          drops prompts that overlap evaluation, near duplicates and wrong lengths
    prompt_pipeline.py  runs these steps for train/sample.py and counts what each of them dropped
    sample_store.py     the rows of a sampled set on disk: parquet shards
    manifest.py         how a set was made and which shards it has; damaged sets are refused or mended
    mixture.py          several sampled sets mixed by weight, in the order in which steps take rows
    vocab_mapping.py    the reduced draft vocabulary: which token ids a draft's columns stand for
    batching.py         rows of a step -> padded or packed Batch with its loss mask

May import decode and eval; of train only its own modules.
"""
