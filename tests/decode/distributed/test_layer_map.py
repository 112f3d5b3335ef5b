"""Which device each layer is on: filled in order, nothing twice, nothing forgotten."""

import pytest
import torch

from decode.common.errors import UserError
from decode.distributed.placement import device_map, plan_layers
from tests.tiny import tiny_model


@pytest.mark.parametrize(
    ("room", "wanted"),
    [
        (
            {"cuda:0": 14, "cuda:1": 20, "cpu": 7},
            "cuda:0 cuda:1 cuda:1 cuda:1 cuda:1 cpu disk disk",
        ),
        ({"cpu": 10}, "disk disk disk disk disk disk disk disk"),
        ({"cuda:0": 100, "cpu": 0}, "cuda:0 " * 8),
        ({"cuda:0": 16, "cpu": 100}, "cuda:0 cpu cpu cpu cpu cpu cpu cpu"),
    ],
)
def test_devices_are_filled_in_order(room: dict[str, int], wanted: str) -> None:
    """Bug: a device gets more than it may hold, or one after a full one is filled first. Layers take 5, the rest 9."""
    found = plan_layers(9 if len(room) > 1 else 10, [5, 5, 5, 5, 5, 4, 4, 4], room)
    assert found == wanted.split()


def test_no_room_for_embedding_and_head_is_an_error() -> None:
    with pytest.raises(UserError, match=r"cuda:0 holds the embedding .* raise it"):
        plan_layers(11, [1], {"cuda:0": 10, "cpu": 1000})


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", "gemma3_text", "mixtral", "phi3"])
def test_each_weight_is_on_one_device(kind: str) -> None:
    """Bug: a norm or a position table of some architecture is in no place, or a module and a part of it in two."""
    model = tiny_model(kind)
    sizes = sum(p.nbytes for p in model.parameters())
    placed = device_map(model.config, torch.float32, {"cpu": int(sizes * 0.8)})
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    assert all(sum(name.startswith(f"{part}.") for part in placed) == 1 for name in names)
    on_disk = [part for part, device in placed.items() if device == "disk"]
    assert on_disk
    assert all(part.rpartition(".")[2].isdigit() for part in on_disk)  # layers alone
