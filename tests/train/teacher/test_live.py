"""The live teacher multiplies by packed weights, and what it returns can take part in a loss."""

import pytest
import torch

from decode.model import runner
from decode.model.hidden_states import HiddenStateSpec
from decode.model.linear import PackedLinear
from tests.tiny import tiny_model, tiny_target
from train.data import batching
from train.data.sample_store import SampleRow
from train.teacher import live
from train.teacher.live import LiveTeacher

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="oneDNN is not part of this torch"
)

ROWS = [
    SampleRow(
        id=str(i), source="test", origin="target", input_ids=list(range(1 + i, 9 + i)),
        loss_spans=[[3, 8]], finish_reason="length",
    )
    for i in range(3)
]  # fmt: skip


def test_the_teacher_runs_on_packed_weights_and_its_output_trains() -> None:
    """Catches a teacher without packed weights, another result than the model's, and tensors of inference mode."""
    plain = tiny_model("llama")
    target, batch = tiny_target(plain), batching.collate(ROWS, 0)
    model = target.runner.model
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    teacher = LiveTeacher(target, HiddenStateSpec((1,)))
    output = teacher.get_output(batch)
    used = [layer for layer in layers if layer is not model.get_output_embeddings()]
    assert used
    assert all(layer.packed is not None for layer in used)
    with torch.no_grad():
        wanted = plain(input_ids=batch.input_ids, use_cache=False, output_hidden_states=True)
    assert torch.allclose(output.features, wanted.hidden_states[1], atol=1e-5)
    logits = teacher.head(output.head_inputs[batch.loss_mask])
    assert torch.allclose(logits, wanted.logits[batch.loss_mask], atol=1e-4)
    weight = torch.ones(output.features.shape[-1], requires_grad=True)
    (output.features * weight).sum().backward()  # saves the features
    assert torch.allclose(weight.grad, output.features.sum((0, 1)))


@pytest.mark.parametrize("begins", [True, False], ids=["as it is", "planted"])
def test_the_teacher_notices_a_changed_target(
    begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a target that is trained on (Medusa-2, LayerSkip) and teaches with its first weights."""
    if not begins:
        for module in (live, runner):
            monkeypatch.setattr(module, "begin_request", lambda: None)
    plain = tiny_model("llama")
    target = tiny_target(plain)
    teacher, batch = LiveTeacher(target, HiddenStateSpec((1,))), batching.collate(ROWS, 0)
    before = teacher.get_output(batch).head_inputs
    with torch.no_grad():
        for model in (plain, target.runner.model):
            for layer in model.modules():
                if isinstance(layer, torch.nn.Linear):
                    layer.weight.mul_(1.5)
        after = plain(input_ids=batch.input_ids, output_hidden_states=True)
    found = teacher.get_output(batch).head_inputs
    assert torch.allclose(found, after.hidden_states[-1], atol=1e-5) == begins
    assert torch.allclose(found, before) != begins
