"""A language model of transformers that runs in fixed shapes: ragged rows, token trees and roll-back.

- names: which names are paths and which are on the Hub, and the Hub when it cannot be reached
- config_checks: whether the sizes in a config make sense
- loading: models and tokenizers from a folder or the Hub, devices and dtypes, and `Target`
- fingerprint: what a target is, wherever its files lie: its weights and the settings of its arithmetic
- made_folders: cached folders that are made once of a model's files, by one process at a time
- gguf_files: GGUF models, dequantised once into a cached folder for each dtype
- gguf_reader: keys, tensors and parts of GGUF files, and their weights as safetensors
- gguf_architectures: the config and parameters that keys and tensors mean; what is not followed is refused by name
- vocabularies: whether two tokenizers give their ids to the same tokens
- quantized/: GPTQ, AWQ, FP8 and compressed-tensors checkpoints, in the same way
- compatibility: which models can be decoded with drafts, and for how many positions
- runner: `ModelRunner`, prefill and decode steps of one model with its K/V cache
- kv_cache: the K/V buffers, and which slots a forward writes and sees
- attention: the attention function that all models run with
- masking/: masks of training, and attention under them for long samples
- split_kv_attention: its Triton kernel for long buffers on a GPU
- layer_stack: where the decoder layers and the final norm of a model are, and models with others
- cut_layers: models with fewer layers, for good or on trial
- regions/: decoder layers as regions of compiled code, and which layers are alike
- hidden_states: hidden states captured during a forward, and the LM head as a function
- vision/: vision-language models behind the same steps, and prompts with images
- encoder_decoder/: T5 behind the same steps, and its passes in transformers' own code
- recurrent/: models with recurrent layers behind the same steps, for chains
- linear/: linear layers as a CPU multiplies by them fastest, or with weights in eight bits

It imports decode.common only.
"""
