"""Folders of speculators 0.9, of every kind that it trains, draft by the logits of its own forwards.

tests/golden/speculators/maker.py made the numbers by the library itself, which is not needed here.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from decode.checkpoints import block_layouts
from decode.common.errors import UserError
from decode.drafts.base import DraftContext, Proposal
from decode.drafts.registry import draft_family
from decode.model.loading import Target
from decode.serving.checker import check_engine_rules
from decode.serving.export import export_draft
from decode.serving.rules import IGNORED
from decode.verification.sampling import SamplingParams
from tests.decode.checkpoints.test_importers import quietly
from tests.golden.speculators import maker
from tests.tiny import tiny_model, tiny_target
from train.families.base import load_saved_config

MADE = json.loads((Path(maker.__file__).parent / "logits.json").read_text())["kinds"]
SIZE = 32
FAR = 2e-5
"""Six digits of the numbers are kept."""


def own_target() -> Target:
    """One of which only the embedding and the LM head matter: its states are given."""
    model = tiny_model(
        "llama", vocab_size=maker.VOCAB, hidden_size=maker.WIDTH, intermediate_size=24,
        num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(maker.embedding())
        model.get_output_embeddings().weight.copy_(maker.head())
    return tiny_target(model)


def write(folder: Path, kind: str, **changes: Any) -> str:
    made = MADE[kind]
    save_file(maker.weights(kind, made["shapes"]), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(made["config"] | changes))
    return str(folder)


@torch.inference_mode()
def proposals(draft: Any, levels: int, sampling: SamplingParams) -> list[Proposal]:
    """What is drafted at each anchor, where the text's own tokens are drawn."""
    text = maker.text()
    found = []
    for anchor in maker.ANCHORS:
        following = iter(text[anchor + 1 :])

        def choose(q: torch.Tensor, left: Iterator[int] = following) -> torch.Tensor:
            return torch.tensor([next(left)])

        draft.begin_batch(DraftContext(1, SIZE, levels, sampling, choose))
        history, count = torch.tensor([text + [0] * (SIZE - len(text))]), torch.tensor([anchor])
        states = maker.features()[None, :anchor]
        draft.prefill(torch.tensor([0]), history[:, :anchor], count, states)
        found.append(draft.propose(history, count + 1, levels))
    return found


def drafted(draft: Any, levels: int) -> torch.Tensor:
    """[anchors, levels, V] log-probabilities that tokens are drawn from."""
    return torch.cat([p.q for p in proposals(draft, levels, SamplingParams(1.0))]).log()  # type: ignore[misc]


def difference(kind: str, draft: Any, levels: int | None = None) -> float:
    """The largest one of the first levels' logits from the library's; inf where one alone excludes a token."""
    wanted = torch.tensor(MADE[kind]["logits"], dtype=torch.float32)[:, :levels]
    found = drafted(draft, wanted.shape[1])
    known = wanted.isfinite()
    same = torch.equal(known, found.isfinite())
    return float((found - wanted)[known].abs().max()) if same else float("inf")


def read(folder: Path, kind: str) -> Any:
    return quietly(write(folder, kind), own_target())


@pytest.mark.parametrize("kind", [kind for kind in MADE if kind != "eagle3_window"])
def test_logits_are_those_of_its_own_forward(kind: str, tmp_path: Path) -> None:
    """Catches a norm, a window, a position, a slot or a head that is computed otherwise than it was trained."""
    draft = read(tmp_path, kind)
    assert draft.name == draft_family(str(tmp_path)) == kind.split("_")[0]
    assert difference(kind, draft) < FAR


def test_a_window_of_eagle3_goes_with_the_token(tmp_path: Path) -> None:
    """As in engines; their training counts it from the first step's token, so a second step there sees one key more."""
    draft = read(tmp_path, "eagle3_window")
    assert difference("eagle3_window", draft, levels=1) < FAR
    assert difference("eagle3_window", draft) > 0.1


@pytest.mark.parametrize("kind", ["xpress", "xpress_full"])
def test_greedy_tokens_are_those_of_its_passes(kind: str, tmp_path: Path) -> None:
    """Catches XPress drafted token by token that is not where its passes over the block end."""
    draft, wanted = read(tmp_path, kind), torch.tensor(MADE[kind]["greedy"])
    found = proposals(draft, wanted.shape[1], SamplingParams(0.0))
    assert torch.equal(torch.cat([proposal.tokens for proposal in found]), wanted)


PLANTED: dict[str, Callable[[Any], Any]] = {
    "xpress": lambda net: net.refiner_head.mix_l.zero_(),  # no token but the last corrects
    "dflash2": lambda net: net.layers[1].mlp_conv.base_kernel[1, 1].zero_(),  # nor the slot before
    "dspark": lambda net: net.windows.__setitem__(0, None),
    "eagle3": lambda net: setattr(net, "normed_output", False),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_bugs_are_seen(kind: str, tmp_path: Path) -> None:
    """The first test is blind if one of these goes unseen."""
    draft = read(tmp_path, kind)
    with torch.no_grad():
        PLANTED[kind](draft.net)
    assert difference(kind, draft) > 1e-2


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """DFlash 2 as its authors save it."""
    inner, selected = config["transformer_layer_config"], [*block_layouts.SELECTED, "mask_token_id"]
    nested = {key: config[key] for key in selected if key in config}
    nested["target_layer_ids"] = [i - 1 for i in maker.TAPS]
    return {
        **inner,
        "architectures": config["architectures"],
        "block_size": maker.BLOCK,
        "dflash_config": nested,
    }


def test_dflash2_of_its_authors_is_read(tmp_path: Path) -> None:
    """Catches settings in the other place; without windows both layouts compute the same."""
    path, config = write(tmp_path, "dflash2"), MADE["dflash2"]["config"]
    inner = config["transformer_layer_config"]
    found = []
    for layout in (flat, lambda c: c):
        own = config | {"transformer_layer_config": inner | {"layer_types": None}}
        (tmp_path / "config.json").write_text(json.dumps(layout(own)))
        found.append(drafted(quietly(path, own_target()), 4))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("dflash", {"speculators_model_type": "domino"}, "'domino'"),
        ("dflash", {"speculators_model_type": "xpress"}, "'xpress'"),
        ("dflash2", {"speculators_model_type": "dflash"}, "'dflash'"),
        ("dflash2", {"draft_vocab_size": 8}, "reduced vocabulary"),
        ("dflash2", {"conv_group_size": 5}, "groups of 5"),
        ("dflash2", {"conv_group_size": 0}, "groups of 0"),
        ("dflash2", {"selector_top_k": 99}, "99 candidates"),
        ("dflash2", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("dflash2", {"input_embedding_scale": 4.0}, "input_embedding_scale"),
        ("xpress", {"xpress_rank": 8}, "refiner_head"),
        ("xpress", {"xpress_mlp_ratio": 4}, "refiner_head"),
    ],
)  # fmt: skip
def test_what_is_not_followed_is_refused(
    kind: str, change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = write(tmp_path, kind, **change)
    with pytest.raises(UserError, match=named):
        quietly(path, own_target())


@pytest.mark.parametrize("kind", ["dflash2", "xpress"])
def test_they_are_neither_trained_nor_written(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, kind)
    with pytest.raises(UserError, match=f"heads of family '{kind}'"):
        load_saved_config(path, "dflash")
    for layout in ("flat", "speculators", "gguf"):
        with pytest.raises(UserError, match="read and not written"):
            export_draft(path, layout, tmp_path / "out", "", 4, "float32")


def test_the_checker_knows_who_serves_dflash2(tmp_path: Path) -> None:
    """vLLM in one runner; of the others, and of XPress, nothing is known."""
    path = write(tmp_path, "dflash2")
    rules = {finding.rule: finding for finding in check_engine_rules(path, "vllm")}
    assert rules["runner"].effect == IGNORED
    assert "method dflash" in rules["runner"].what
    assert all(finding.effect == IGNORED for finding in rules.values())
    assert [f.rule for f in check_engine_rules(path, "sglang")] == ["unchecked"]
    path = write(tmp_path, "xpress")
    assert [f.rule for f in check_engine_rules(path, "vllm")] == ["unchecked"]
