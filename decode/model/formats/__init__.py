"""Forms of stored weights that transformers does not load as they are; each becomes a plain folder in the cache, once.

- made_folders: such folders, each made by one process at a time
- adapters: LoRA adapters, merged into their base
- gguf_files: GGUF models, dequantised for each dtype; gguf_reader reads the files' keys and tensors, and
  gguf_architectures knows the config and parameters that these mean, gguf_tokenizers the ids of texts; what is not
  followed is refused by name
- quantized: GPTQ, AWQ, FP8 and compressed-tensors checkpoints, and int8 weights
- tied_heads: whether embedding and LM head of a model are one matrix, as its tensors say

It imports decode.common, decode.model.names and decode.model.vocabularies.
"""
