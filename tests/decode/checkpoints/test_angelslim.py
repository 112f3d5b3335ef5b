"""DFlash and DFlare as AngelSlim saves them draft by the logits of its own forward, which is not needed here:
tests/golden/angelslim/maker.py made the numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.common.errors import UserError
from decode.drafts.registry import draft_family
from decode.serving.checker import check_engine_rules
from decode.serving.export import export_draft
from tests.decode.checkpoints.test_importers import quietly
from tests.decode.checkpoints.test_speculators import FAR, drafted, own_target
from tests.golden.angelslim import maker as own_maker
from tests.golden.speculators import maker

MADE = json.loads((Path(own_maker.__file__).parent / "logits.json").read_text())["kinds"]


def write(folder: Path, kind: str) -> str:
    made = MADE[kind]
    save_file(maker.weights(kind, made["shapes"]), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(made["config"]))
    return str(folder)


def difference(kind: str, draft: Any) -> float:
    wanted = torch.tensor(MADE[kind]["logits"])
    return float((drafted(draft, wanted.shape[1]) - wanted).abs().max())


@pytest.mark.parametrize("kind", MADE)
def test_logits_are_those_of_its_own_forward(kind: str, tmp_path: Path) -> None:
    draft = quietly(write(tmp_path, kind), own_target())
    assert draft.name == draft_family(str(tmp_path)) == kind
    assert difference(kind, draft) < FAR


PLANTED = {
    "one fusion for all layers": lambda net: net.layer_fusion_weights.data.copy_(
        net.layer_fusion_weights.data[:1].expand_as(net.layer_fusion_weights)
    ),
    "keys of the block": lambda net: net.layers[0].self_attn.k_proj_target.weight.data.copy_(
        net.layers[0].self_attn.k_proj.weight.data
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_seen(bug: str, tmp_path: Path) -> None:
    draft = quietly(write(tmp_path, "dflare"), own_target())
    PLANTED[bug](draft.net)
    assert difference("dflare", draft) > 1e-2


def test_a_dflare_of_other_sizes_is_refused_and_none_is_written(tmp_path: Path) -> None:
    path = write(tmp_path, "dflare")
    for layout in ("flat", "speculators", "gguf"):
        with pytest.raises(UserError, match="read and not written"):
            export_draft(path, layout, tmp_path / "out", "", 4, "float32")
    assert {finding.rule for finding in check_engine_rules(path, "vllm")} == {"unchecked"}
    tensors = load_file(tmp_path / "model.safetensors")
    wider = tensors | {"layer_fusion_weights": torch.zeros(2, 5)}
    save_file(wider, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="names the layers"):
        quietly(path, own_target())
