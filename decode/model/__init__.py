"""A language model of transformers that runs in fixed shapes: ragged rows, token trees and roll-back.

- names: which names are paths and which are on the Hub, and the Hub when it cannot be reached
- loading: models and tokenizers from a folder or the Hub, devices and dtypes, `Target`, and the runner of a model
- formats/: GGUF, quantised checkpoints and adapters as plain folders
- quantized/: linear layers in eight or four bits
- fingerprint: what a target is, wherever its files lie: its weights and the settings of its arithmetic
- vocabularies: whether two tokenizers give their ids to the same tokens
- compatibility: which models can be decoded with drafts, and for how many positions
- runner: `ModelRunner`, prefill and decode steps of one model with its K/V cache
- seq2seq, recurrent, vision: the same steps for T5, for models with recurrent layers (chains only), and for prompts
  with images
- kv_cache: the K/V buffers, and which slots a forward writes and sees
- attention: the attention function that all models run with
- gpu/: a layer in few kernels on a GPU, split-KV attention among them
- masks: masks of training, and attention under them for long samples
- layer_stack: where the decoder layers and the final norm of a model are, and models with others
- cut_layers: models with fewer layers
- regions: decoder layers as regions of compiled code, and which layers are alike
- hidden_states: hidden states captured during a forward, and the LM head as a function
- linear: linear layers as a CPU multiplies by them fastest; inductor_linear: what inductor writes for
  their products
- modules: norm, rotary embedding and gated MLP of the layers that we run ourselves

It imports decode.common only.
"""
