"""Multi-token prediction layers: their distributions are those of plain passes, their files those of native layers."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.checkpoints import importers
from decode.common.errors import UserError
from decode.drafts import mtp
from decode.drafts.mtp import MtpDraft, MtpModel
from decode.drafts.registry import draft_family, load_draft
from decode.model.hidden_states import LMHead
from decode.model.loading import Target, load_target
from tests.blocks import PROMPTS, chain_drift
from tests.heads import prefilled, randomise
from tests.tiny import ARCHITECTURES, tiny_model, tiny_target

KINDS = [
    "llama", "llama+yarn", "qwen2", "qwen2+window", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma",
    "gemma2", "gemma3_text", "olmo2", "olmo3", "cohere", "granite", "gpt_oss", "deepseek_v3",
]  # fmt: skip


def net_of(target: Target, seed: int = 3) -> MtpModel:
    model = target.runner.model
    net = MtpModel(mtp.last_layer(model), LMHead(model))
    randomise(net, seed)  # type: ignore[arg-type]
    return net.to(model.dtype)


def draft_of(target: Target, shape: Any = None) -> MtpDraft:
    draft = MtpDraft(net_of(target), target, "mtp")
    draft.shape = shape
    return draft


@torch.no_grad()
def plain_laws(net: MtpModel, own: Target, text: list[int], drafted: list[int]) -> Tensor:
    """[n + 1, V]: logits after each of the n drafted tokens, each from one pass over everything, without a cache."""
    weight = own.runner.model.get_input_embeddings().weight
    states = prefilled(own, text[:-1], net.aux_layers)[None]
    tokens, laws = list(text[1:]), []
    for token in [*drafted, None]:
        position = torch.arange(len(tokens))[None]
        out = net(states, net.embed(torch.tensor([tokens]), weight), position, None)
        laws.append(net.logits(out[:, -1])[0])
        states = torch.cat([states, out[:, -1:]], 1)
        tokens.append(-1 if token is None else token)
    return torch.stack(laws)


def drift(draft: MtpDraft, inner: MtpDraft, own: Target, **settings: Any) -> tuple[float, set[int]]:
    """(largest difference of a chain's laws from `plain_laws`, accepted lengths that occurred)."""
    wanted = partial(plain_laws, draft.net, own)
    return chain_drift(draft, draft.net, "logits", own, wanted, **settings)


def native_folder(folder: Path, arch: str) -> tuple[MtpModel, Target]:
    """A target's folder with a random MTP layer in its weights, as DeepSeek publishes it."""
    model = tiny_model(arch)
    own = tiny_target(model)
    depth = own.runner.config.num_hidden_layers
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    net = net_of(own)
    copies = {
        f"model.layers.{depth}.embed_tokens.weight": model.get_input_embeddings()
        .weight.detach()
        .clone(),
        f"model.layers.{depth}.shared_head.head.weight": model.lm_head.weight.detach().clone(),
    }
    file = folder / "model.safetensors"
    own_tensors = mtp.to_files(net.state_dict(), depth)
    save_file({**load_file(file), **copies, **own_tensors}, file, {"format": "pt"})
    return net, own


@pytest.mark.parametrize("arch", ["llama", "deepseek_v3", "qwen3_moe"])
def test_the_targets_own_folder_is_the_draft(arch: str, tmp_path: Path) -> None:
    """Catches a layer that is lost, one of the target's taken for it, experts in the wrong order or halves swapped."""
    net, own = native_folder(tmp_path, arch)
    assert draft_family(str(tmp_path)) == "mtp"
    with pytest.warns(UserWarning, match="names no tokenizer"):
        draft = load_draft(str(tmp_path), own)
    assert isinstance(draft, MtpDraft)
    state = draft.net.state_dict()
    assert state.keys() == net.state_dict().keys()
    for key, value in net.state_dict().items():
        assert torch.equal(value, state[key]), key
    names = importers.raw_tensors(str(tmp_path))
    assert all(f"layers.{own.runner.config.num_hidden_layers}." in name for name in names)


@torch.no_grad()
def test_a_native_layer_computes_what_transformers_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An independent reading of the same files: names, experts, order of the halves, norms and positions."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(getattr(layers, "MtpModel", None), "forward_layer"):
        pytest.skip("this transformers runs no single MTP layer")
    net, own = native_folder(tmp_path, "deepseek_v3")
    depth = own.runner.config.num_hidden_layers
    target = load_target(str(tmp_path)) if (tmp_path / "tokenizer.json").exists() else own
    model = target.runner.model
    kind = type(model)
    monkeypatch.setattr(
        kind, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{depth}\..*"]
    )
    reference = kind.from_pretrained(tmp_path)
    reference.set_attn_implementation("eager")
    theirs = layers.MtpModel.from_pretrained(reference)
    text = PROMPTS[0]
    states = prefilled(own, text[:-1], net.aux_layers)[None]
    position = torch.arange(1, len(text))[None]
    from transformers.cache_utils import MtpCache

    cache = MtpCache(config=reference.config.get_mtp_config())
    tokens = torch.tensor([text[1:]])
    out = theirs.forward_layer(0, states, position, cache, input_ids=tokens)
    embeds = net.embed(tokens, own.runner.model.get_input_embeddings().weight)
    ours = net(states, embeds, position - 1, None)  # only differences of positions count
    assert float((ours - out).abs().max()) < 1e-4


def test_a_layer_of_another_target_is_refused(tmp_path: Path) -> None:
    native_folder(tmp_path, "llama")
    other = tiny_target(tiny_model("llama", num_hidden_layers=4))
    with (
        pytest.warns(UserWarning, match="names no tokenizer"),
        pytest.raises(UserError, match="num_hidden_layers"),
    ):
        load_draft(str(tmp_path), other)


def test_a_target_without_such_names_is_refused() -> None:
    with pytest.raises(UserError, match="EAGLE head"):
        mtp.last_layer(tiny_model("gpt2"))


assert set(KINDS) <= set(ARCHITECTURES)
