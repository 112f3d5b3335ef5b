"""The decoding loop.

engine       `SpeculativeEngine`: prompts to rows, rounds, refilling; `speculate` and `decode`
round        one round on the device: propose, verify in one pass of the target, accept, commit
forced_tokens  proposals under grammars: chains with the tokens that a grammar forces behind them
active_request  a request's length and end on the host; checks of prompts
records      what a round did to one prompt, and the record of a whole request
text_stream  the text of an answer while its tokens arrive: whole characters
compile      torch.compile for the two halves of a round
warm_up      runs every shape of rounds once, before decoding is timed
cuda_graph   a round as one CUDA graph, and asynchronous copies to the host
round_memory the bytes of a round beside weights and KV cache

May import decode.common, decode.model, decode.verification, decode.constraints and decode.drafts.
"""
