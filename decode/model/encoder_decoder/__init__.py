"""Encoder-decoders (T5) behind the same steps as causal LMs: a row is the prompt followed by the answer.

- ragged_positions: relative position bias for rows of unequal length and token trees
- encoded_prompts: the encoder's output for each row, as the keys and values that cross-attention reads
- seq2seq_runner: `Seq2SeqRunner`, the ModelRunner of an encoder-decoder, and `build_runner` for every kind of model
- plain_passes: the model in transformers' own code on prompt and answer, for references and training

The encoder reads the prompt. The decoder reads its start token in the place of the prompt's last token, and then the
answer: token t of a row is at position t - (prompt length - 1) of the decoder. So nothing outside this folder has to
know that there are two parts: logits at the prompt's last position predict the answer's first token.

It imports decode.common and the modules of decode.model but for loading.
"""
