"""EAGLE-3, DFlash, DSpark and Domino as Model-Optimizer exports them draft by the logits of its own training pass. That
is not needed here: tests/golden/modelopt/maker.py made the numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.common.errors import UserError
from decode.drafts.registry import draft_family
from tests.decode.checkpoints.test_importers import quietly
from tests.decode.checkpoints.test_speculators import FAR, drafted, own_target
from tests.golden.modelopt import maker as own_maker
from tests.golden.speculators import maker

MADE = json.loads((Path(own_maker.__file__).parent / "logits.json").read_text())["kinds"]


def write(folder: Path, kind: str, nested: dict[str, Any] | None = None) -> str:
    """Its folder, with changes of `dflash_config`."""
    made = MADE[kind]
    config = dict(made["config"])
    if nested:
        config["dflash_config"] = config["dflash_config"] | nested
    save_file(own_maker.weights(kind, made["shapes"]), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def difference(kind: str, draft: Any) -> float:
    wanted = torch.tensor(MADE[kind]["logits"])
    return float((drafted(draft, wanted.shape[1]) - wanted).abs().max())


@pytest.mark.parametrize("kind", [kind for kind in MADE if not kind.endswith("scaled")])
def test_logits_are_those_of_its_own_pass(kind: str, tmp_path: Path) -> None:
    """Catches other names that are read as other tensors, a slot that is off by one, and windows of other slots."""
    draft = quietly(write(tmp_path, kind), own_target())
    assert draft.name == draft_family(str(tmp_path)) == kind.partition(",")[0]
    if not kind.startswith("eagle3"):
        assert draft.net.max_tokens == len(MADE[kind]["logits"][0])
    assert difference(kind, draft) < FAR


def test_an_eagle3_was_trained_with_states_that_are_scaled_twice(tmp_path: Path) -> None:
    """Its first layer norms the fused states by the embeddings' norm before their own. We compute what engines do; if
    one of them follows its training, this test says that there is a choice to make."""
    draft = quietly(write(tmp_path, "eagle3, scaled"), own_target())
    assert difference("eagle3, scaled", draft) > 0.1
    first = draft.net.layers[0]
    plain = first.hidden_norm.forward
    first.hidden_norm.forward = lambda x: plain(first.input_layernorm(x))
    assert difference("eagle3, scaled", draft) < FAR


@pytest.mark.parametrize("kind", [kind for kind in MADE if kind.endswith("window")])
@pytest.mark.parametrize(
    "planted",
    [
        {"use_swa": False},
        {"swa_window_size": maker.WINDOW + 1},
        {"swa_window_size": maker.WINDOW - 1},
    ],
    ids=str,
)
def test_windows_are_not_left_out(kind: str, planted: dict[str, Any], tmp_path: Path) -> None:
    """Bug: `layer_types` says full attention, and a draft that was trained with windows is decoded without them."""
    draft = quietly(write(tmp_path, kind, planted), own_target())
    assert difference(kind, draft) > 1e-2


def test_what_is_not_followed_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "domino", {"use_swa": True})
    with pytest.raises(UserError, match="use_swa True"):
        quietly(path, own_target())
    path = write(tmp_path, "dspark", {"causal": True})
    with pytest.raises(UserError, match="causal blocks"):
        quietly(path, own_target())
    path = write(tmp_path, "dflash")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"layers.0.self_attn.sinks": torch.zeros(2)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(UserError, match="sinks"):
        quietly(path, own_target())
