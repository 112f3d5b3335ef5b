"""Domino and DSpark as SpecForge saves them draft by the logits of SpecForge's own forward, which is not needed here:
tests/golden/specforge/maker.py made the numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.common.errors import UserError
from decode.drafts.registry import draft_family
from decode.serving.checker import check_draft_files, check_engine_rules
from decode.serving.export import export_draft
from decode.serving.rules import IGNORED, REFUSED
from decode.verification.sampling import SamplingParams
from tests.decode.checkpoints.test_importers import quietly
from tests.decode.checkpoints.test_speculators import FAR, drafted, own_target, proposals
from tests.golden.specforge import maker as own_maker
from tests.golden.speculators import maker
from train.families.base import load_saved_config

MADE = json.loads((Path(own_maker.__file__).parent / "logits.json").read_text())["kinds"]


def write(
    folder: Path, kind: str = "shifted", nested: dict[str, Any] | None = None, **changes: Any
) -> str:
    """Its folder, with changes of `dflash_config` and of what stands beside it."""
    made = MADE[kind]
    config = made["config"] | changes
    config["dflash_config"] = config["dflash_config"] | (nested or {})
    save_file(maker.weights(kind, made["shapes"]), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def read(folder: Path, kind: str = "shifted", **changes: Any) -> Any:
    return quietly(write(folder, kind, **changes), own_target())


def difference(kind: str, draft: Any) -> float:
    wanted = torch.tensor(MADE[kind]["logits"])
    return float((drafted(draft, wanted.shape[1]) - wanted).abs().max())


@pytest.mark.parametrize("kind", MADE)
def test_logits_are_those_of_its_own_forward(kind: str, tmp_path: Path) -> None:
    """Catches a slot, a token of the prefix or an uncorrected place that is off by one, and gates of the GRU in another
    order."""
    draft = read(tmp_path, kind)
    family = "dspark" if kind.startswith("dspark") else "domino"
    assert draft.name == draft_family(str(tmp_path)) == family
    assert draft.net.max_tokens == len(MADE[kind]["logits"][0])
    assert difference(kind, draft) < FAR


def test_confidence_is_there_or_not(tmp_path: Path) -> None:
    """Catches a draft without this head that is refused or gets one at random, and a head of other inputs."""
    for kind in ("dspark", "dspark, no confidence"):
        (tmp_path / kind).mkdir()
        net = read(tmp_path / kind, kind).net
        assert (net.confidence_head is not None) == (kind == "dspark")
        out = tmp_path / f"{kind} flat"
        export_draft(str(tmp_path / kind), "flat", out, "", 4, "float32")
        assert difference(kind, quietly(str(out), own_target())) < FAR
    with pytest.raises(UserError, match="confidence_head_with_markov false"):
        read(tmp_path, "dspark", nested={"confidence_head_with_markov": False})
    with pytest.raises(UserError, match="type 'gated'"):
        read(tmp_path, "dspark", nested={"markov_head_type": "gated"})


@pytest.mark.parametrize("kind", own_maker.KINDS)
def test_greedy_tokens_are_those_of_its_own_drafting(kind: str, tmp_path: Path) -> None:
    """Of a block that predicts from its anchor's slot it leaves the last out."""
    draft, wanted = read(tmp_path, kind), torch.tensor(MADE[kind]["greedy"])
    found = proposals(draft, draft.net.max_tokens, SamplingParams(0.0))
    tokens = torch.cat([proposal.tokens for proposal in found])
    assert torch.equal(tokens[:, : wanted.shape[1]], wanted)


PLANTED = {
    "no memory": lambda net: net.prefix_gru.weight_hh_l0.data.zero_(),  # of the last token alone
    "no state": lambda net: net.embed_proj[0].weight.data[:, : maker.WIDTH].zero_(),
    "corrected everywhere": lambda net: setattr(net, "uncorrected", 0),
    "one slot late": lambda net: setattr(net, "first", 1),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_seen(bug: str, tmp_path: Path) -> None:
    """The first test is blind if one of these goes unseen."""
    draft = read(tmp_path)
    PLANTED[bug](draft.net)
    wanted = torch.tensor(MADE["shifted"]["logits"])[:, : draft.net.max_tokens]
    assert float((drafted(draft, wanted.shape[1]) - wanted).abs().max()) > 1e-2


def test_the_names_of_its_older_versions_are_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    tensors = {
        f"logit_head.{name}" if name.startswith(("prefix_gru", "embed_proj")) else name: value
        for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert difference("shifted", quietly(path, own_target())) < FAR


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"nested": {"projector_type": "causal_v5"}}, "projector_type 'causal_v5'"),
        ({"nested": {"shift_label": 1}}, "shift_label 1"),
        ({"nested": {"pure_draft_prefix_len": -1}}, "pure_draft_prefix_len -1"),
        ({"nested": {"gru_hidden_dim": None}}, "gru_hidden_dim None"),
        ({"nested": {"num_gru_layers": 2}}, "num_gru_layers 2"),
        ({"nested": {"emb_dim": 9}}, "embed_proj"),
        ({"nested": {"gru_hidden_dim": 9}}, "prefix_gru"),
        ({"nested": {"causal": True}}, "causal blocks"),
        ({"emb_dim": 9}, "emb_dim 9 outside"),
        ({"draft_vocab_size": 8}, "draft_vocab_size 8"),
        ({"use_sliding_window": True, "layer_types": None}, "use_sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"speculators_model_type": "dflash"}, "'dflash'"),
    ],
)  # fmt: skip
def test_what_is_not_followed_is_refused(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=named):
        read(tmp_path, **changes)


def test_a_domino_without_its_correction_is_refused(tmp_path: Path) -> None:
    """Catches one that is decoded as the DFlash that it was not trained to be."""
    path = write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if not n.startswith(("prefix_gru", "embed_proj"))}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="without its correction"):
        quietly(path, own_target())


def test_it_is_neither_trained_nor_written(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(UserError, match="heads of family 'domino'"):
        load_saved_config(path, "dflash")
    for layout in ("flat", "speculators", "gguf"):
        with pytest.raises(UserError, match="read and not written"):
            export_draft(path, layout, tmp_path / "out", "", 4, "float32")


def effects(path: str, engine: str) -> dict[str, str]:
    return {finding.rule: finding.effect for finding in check_engine_rules(path, engine)}


def test_the_checker_knows_who_serves_it(tmp_path: Path) -> None:
    """SGLang, under DFlash's name and with the settings that it reads; of llama.cpp nothing is known."""
    path = write(tmp_path, architectures=["DFlashDraftModel"])
    assert effects(path, "sglang") == {"runner": IGNORED}
    assert [finding.rule for finding in check_draft_files(path, "sglang")] == ["runner"]
    assert effects(path, "vllm") == effects(path, "trtllm") == {"unserved": REFUSED}
    assert list(effects(path, "llamacpp")) == ["unchecked"]
    path = write(tmp_path, "from the first")
    wanted = {"architecture": REFUSED, "correction": REFUSED, "runner": IGNORED}
    assert effects(path, "sglang") == wanted
    path = write(tmp_path, nested={"projector_type": "causal_v5"})
    assert "decoder" in {finding.rule for finding in check_draft_files(path, "sglang")}
