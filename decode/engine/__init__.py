"""The decoding loop.

engine       `SpeculativeEngine`: prompts to rows, rounds, refilling; `speculate` and `decode`
round        one round on the device: propose, with the tokens that a grammar forces, verify in one pass of the target,
             accept, commit; its bytes beside weights and KV cache
memory       the rows that a GPU has memory for; how many prompts are prefilled together there
composing    drafts with a lookup in front, ended by confidence, or beside the target's pass
active_request  a request's length and end on the host; checks of prompts
records      what a round did to one prompt, and the record of a whole request
text_stream  the text of an answer while its tokens arrive: whole characters
image_prompts  a prompt with images as token ids and what the model's vision part reads
compiled     torch.compile for the two halves of a round, a round as one CUDA graph, asynchronous copies to the host
trained_template  the chat template of a command's setting, else that of its draft's training
warm_up      runs every shape of rounds once, before decoding is timed

May import decode.common, decode.model, decode.verification, decode.constraints, decode.checkpoints and
decode.drafts.
"""
