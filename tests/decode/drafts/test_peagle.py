"""P-EAGLE in the engine: its distributions are those of one pass over all pairs and masks, its text is the target's."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.checkpoints import eagle_layouts, layouts
from decode.checkpoints.draft_folder import METADATA_FILE
from decode.common.errors import UserError
from decode.drafts.blocks import PEagleDraft
from decode.drafts.eagle_model import Eagle3Model, llama_config
from decode.drafts.registry import draft_family, load_draft
from decode.model.hidden_states import HiddenStateSpec
from decode.model.loading import Target
from tests.blocks import decode_and_compare, watch_logits
from tests.decode.drafts.test_dflash import IDS
from tests.heads import causal, prefilled, randomise
from tests.tiny import tiny_model, tiny_target

TAPS = (0, 1, 2)


def fields(
    target: Target, ids: Tensor | None = IDS, taps: tuple[int, ...] = TAPS
) -> dict[str, Any]:
    vocab = target.runner.vocab_size
    size = vocab if ids is None else len(ids)
    config = eagle_layouts.eagle3_config(target.runner.config, vocab, size, taps)
    return eagle_layouts.peagle_config(config, vocab - 1)


def net_of(target: Target, ids: Tensor | None = IDS, taps: tuple[int, ...] = TAPS) -> Eagle3Model:
    net = Eagle3Model(llama_config(fields(target, ids, taps)), HiddenStateSpec(taps), ids)
    randomise(net, 3)
    return net.to(target.runner.model.dtype)


def draft_of(target: Target, shape: Any = None, **more: Any) -> PEagleDraft:
    draft = PEagleDraft(net_of(target, **more), target, "peagle")
    draft.shape = shape
    return draft


def one_pass(net: Eagle3Model, own: Target, text: list[int], depth: int) -> Tensor:
    """[depth, Vd]: logits from all pairs of the text and depth - 1 masks, without a cache."""
    features = prefilled(own, text[:-1], net.aux_layers)[None]
    masks = net.mask_hidden.expand(1, depth - 1, -1)
    tokens = torch.tensor([[*text[1:], *[net.mask_token] * (depth - 1)]])
    embeds = net.embed(tokens, own.runner.model.get_input_embeddings().weight)
    state = net.init_state(torch.cat([features, masks], 1))
    return net.logits(net.step(state, embeds, torch.arange(tokens.shape[1])[None], causal))[
        0, -depth:
    ]


def drift(draft: Any, inner: PEagleDraft, own: Target, **settings: Any) -> tuple[float, set[int]]:
    """(largest difference from `one_pass`, accepted lengths that occurred)."""
    with watch_logits(inner, inner.net, "logits") as seen:
        wanted = partial(one_pass, inner.net, own)
        return decode_and_compare(own, draft, seen, wanted, **settings)


@pytest.mark.parametrize("ids", [None, IDS], ids=["whole", "reduced"])
def test_a_saved_draft_is_the_same(ids: Tensor | None, tmp_path: Path) -> None:
    """Catches the mask's state or token lost on the way, and P-EAGLE taken for EAGLE-3."""
    own = tiny_target(tiny_model("llama"))
    taps = (0, 1, 2)
    net = net_of(own, ids, taps)
    layouts.save_heads(tmp_path, fields(own, ids, taps), net, torch.float32, ids)
    assert draft_family(str(tmp_path)) == "peagle"
    facts = {"family": "peagle", "tokenizer_hash": own.fingerprint}
    (tmp_path / METADATA_FILE).write_text(json.dumps(facts))
    draft = load_draft(str(tmp_path), own)
    assert isinstance(draft, PEagleDraft)
    for key, value in net.state_dict().items():
        assert torch.equal(value, draft.net.state_dict()[key]), key
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("mask_token_id")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="mask_token_id"):
        load_draft(str(tmp_path), own)
