"""A small language model on the vocabulary of a target with another tokenizer: a draft that any engine takes.

A token of the target that the model's tokenizer has too keeps its row of the embedding and of the LM head. Any other
one gets the mean of the rows of the tokens with which the model's tokenizer spells it, in both tables, as fast
vocabulary transfer does (Gee et al. 2022): in the embedding a fair guess of what the text means, in the head a rough
one, since a logit is then the mean of the logits of all parts and not that of the first. Training moves both
(train/distill.py --draft.init).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.checkpoints.draft_folder import DraftMetadata, Transplant
from decode.common.errors import UserError
from decode.common.target_record import TargetRecord
from decode.drafts.causal import load_ids
from decode.model import loading
from decode.model.names import recorded_name
from decode.model.vocabularies import Spelling, disagreement, shared_tokens


def transplant(name: str, target: str, out: Path, facts: DraftMetadata) -> DraftMetadata:
    """Writes the language model `name` (folder, Hub name or GGUF) to the folder `out` with the vocabulary and the
    tokenizer files of `target`; returns `facts`, what draftsmith.json says of the model, with what was done. Embedding
    and LM head stay one matrix where they are. UserError for a model that reads the target's ids already, for one with
    other tables of its vocabulary than these two, and for one with a reduced vocabulary."""
    own, other = loading.load_tokenizer(name), loading.load_tokenizer(target)
    if disagreement(own, other) is None:
        raise UserError(
            f"{name!r} has the token ids of {target!r} already: --format hf gives it as many rows"
        )
    dtype = str(loading.load_config(name, "draft").dtype or "float32").removeprefix("torch.")
    model = loading.load_model(name, "draft", "cpu", dtype)
    weights = loading.model_fingerprint(model.config.name_or_path).weights
    rows = model.get_input_embeddings().weight.shape[0]
    check_tables(name, model, rows)
    config = loading.load_config(target, "target")
    size = config.get_text_config(decoder=True).vocab_size
    spellings = Spelling(own, rows), Spelling(other, size)
    shared = shared_tokens(*spellings)
    lay_rows(model, source_rows(*spellings, shared, size))
    for one in (model.config.get_text_config(decoder=True), model.generation_config):
        one.bos_token_id, one.eos_token_id = other.bos_token_id, other.eos_token_id
        one.pad_token_id = other.pad_token_id
    model.generation_config.eos_token_id = loading.end_ids(target, config) or other.eos_token_id
    model.save_pretrained(out, safe_serialization=True)
    loading.copy_tokenizer_files(target, out)
    called, commit = recorded_name(name)
    fingerprint = loading.tokenizer_fingerprint(own)
    source = TargetRecord(called, commit, tokenizer=fingerprint, weights=weights)
    return replace(
        facts,
        family="causal",
        tokenizer_hash=loading.tokenizer_fingerprint(other),
        transplanted=Transplant(source, len(shared), len(spellings[1].pieces)),
    )


def check_tables(name: str, model: Any, rows: int) -> None:
    """UserError unless embedding and LM head, of `rows` rows each, are all that the model has of its vocabulary."""
    own = {id(model.get_input_embeddings().weight)}
    head = model.get_output_embeddings()
    own |= {id(head.weight), id(head.bias)}
    more = [n for n, x in model.named_parameters() if x.shape[:1] == (rows,) and id(x) not in own]
    if model.config.is_encoder_decoder or more or len(head.weight) != rows:
        what = more[0] if more else "an encoder, or a head of another size than its embedding"
        raise UserError(
            f"{name!r} has a vocabulary in more than an embedding and an LM head ({what}): choose another model"
        )
    if load_ids(name, rows) is not None:
        raise UserError(f"{name!r} has a reduced vocabulary: transplant the whole model")


def source_rows(
    own: Spelling, other: Spelling, shared: dict[int, int], size: int
) -> list[list[int]]:
    """Of each of the `size` tokens of `other` those of `own` whose rows it gets the mean of: its own one if it is among
    the `shared`, else those that spell it; [] for an id that is no token."""

    def spelled(piece: bytes) -> list[int]:
        # Behind a line feed SentencePiece puts no space in front.
        behind = own.encode_from(b"\n" + piece, [1])
        return own.encode(piece) if behind is None else behind[1]

    return [
        [shared[number]] if number in shared else spelled(other.pieces.get(number, b""))
        for number in range(size)
    ]


def lay_rows(model: Any, source: Sequence[Sequence[int]]) -> None:
    """Gives embedding and LM head of the model, in place, for each entry of `source` the mean of these rows; of all
    rows for an empty entry, whose logit is then never the largest."""
    head = model.get_output_embeddings()
    old = [model.get_input_embeddings().weight, head.weight]
    old += [] if head.bias is None else [head.bias]
    laid = [mean_rows(weight.detach(), source) for weight in old]
    model.resize_token_embeddings(len(source), mean_resizing=False)
    head = model.get_output_embeddings()  # a new one
    new = [model.get_input_embeddings().weight, head.weight, head.bias]
    with torch.no_grad():
        for weight, value in zip(new, laid, strict=False):
            weight.copy_(value)


def mean_rows(weight: Tensor, source: Sequence[Sequence[int]]) -> Tensor:
    """[V, ...] the mean of the rows source[v] of `weight` [Vd, ...], of all for an empty one; one row bit for bit."""
    table = weight.float().reshape(len(weight), -1)
    counts = torch.tensor([len(rows) for rows in source])
    flat = torch.tensor([number for rows in source for number in rows], dtype=torch.long)
    found = F.embedding_bag(flat, table, counts.cumsum(0) - counts, mode="mean")
    found[counts == 0] = table.mean(0)
    return found.reshape(len(source), *weight.shape[1:]).to(weight.dtype)
