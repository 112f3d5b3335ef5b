"""Vision-language models behind the same steps as causal LMs: a row is a prompt, perhaps with images, and its answer.

- vision_runner: `VisionRunner`, the ModelRunner of a vision-language model
- image_prompts: a text and image files as token ids and the tensors that the model's vision part reads

The processor writes an image into the prompt as a run of placeholder tokens. A prompt with images is read in one pass
of transformers' own code, in which the vision part fills these places; the keys and values of that pass are copied
into the row's buffers. From then on the row is text like any other, so verification, trees and drafts stay as they are.

It imports decode.common and the modules of decode.model but for loading.
"""
