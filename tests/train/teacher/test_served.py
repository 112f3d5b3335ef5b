"""Hidden states from a server: equal to those of the target here, no file stays, wrong answers are refused.

A stand-in for vLLM computes the states with the whole model and writes them as vLLM's connector does.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.common.errors import UserError
from decode.engine.engine import decode
from decode.model.hidden_states import HiddenStateSpec
from decode.model.loading import Target, load_target
from decode.serving.running import completions
from tests import worlds
from tests.train.sampling.stand_in import StandIn, serving
from tests.train.teacher.test_feature_store import rows_of
from tests.worlds import World
from train.data import batching
from train.settings.data import StatesServerConfig
from train.teacher.live import LiveTeacher
from train.teacher.served import LAYERS_FILE, ServedTeacher, served_layers

TAPS = HiddenStateSpec((1, 0))
"""Not in rising order, as a server gives them."""
ROWS = rows_of(5, 9, 14, 23, vocab=100)


class StatesServer(StandIn):
    """Answers each request with its most probable next token and a file of states."""

    damage: Callable[[int, dict[str, Any]], None] = staticmethod(lambda number, tensors: None)
    """(number of the request, tensors of its file): changes them."""
    name_prefix = ""

    def __init__(self, target: Target, folder: Path) -> None:
        super().__init__()
        self.target, self.folder, self.number = target, folder, 0
        self.layers = served_layers(TAPS, target.runner.config.num_hidden_layers)

    def reply_to(self, body: dict[str, Any]) -> tuple[list[int], str]:
        return [], "length"  # `response` makes the reply

    @torch.no_grad()
    def response(self, body: dict[str, Any], ids: list[int], finish: str) -> dict[str, Any]:
        assert (body["max_tokens"], body["temperature"]) == (1, 0)
        with self.lock:
            self.number += 1
            number = self.number
            model = self.target.runner.model
            seen: list[torch.Tensor] = []
            stack = model.model
            hooks = [
                module.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
                for module in (*stack.layers, stack.norm)
            ]
            logits = model(input_ids=torch.tensor([body["prompt"]]), use_cache=False).logits
            for hook in hooks:
                hook.remove()
        tensors = {
            "hidden_states": torch.stack([seen[layer] for layer in self.layers], 1),
            "token_ids": torch.tensor(body["prompt"]),
        }
        self.damage(number, tensors)
        file = self.folder / f"request-{number}.safetensors"
        if tensors:
            save_file(tensors, file)
            (self.folder / f"{file.name}.lock").touch()
        choice = {"text": "", "finish_reason": "length", "token_ids": [int(logits[0, -1].argmax())]}
        path = f"/elsewhere{self.name_prefix}/{file.name}"
        return {"choices": [choice], "kv_transfer_params": {"hidden_states_path": path}}


@pytest.fixture
def server(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StatesServer]:
    monkeypatch.setattr(completions, "FIRST_WAIT", 0.02)
    folder = tmp_path / "states"
    folder.mkdir()
    with serving(StatesServer(target, folder)) as running:
        assert isinstance(running, StatesServer)
        yield running


def settings(server: StatesServer, retries: int = 2) -> StatesServerConfig:
    return StatesServerConfig(server.url, str(server.folder), concurrency=2, retries=retries)


def served(world: World, server: StatesServer) -> ServedTeacher:
    bare = load_target(str(world.target), "cpu", with_layers=False)
    return ServedTeacher(bare, TAPS, settings(server))


@pytest.mark.parametrize("place", [batching.collate, batching.pack])
def test_states_and_logits_are_those_of_the_target_here(
    world: World, target: Target, server: StatesServer, place: Callable[..., batching.Batch]
) -> None:
    """Bug: taps in another order than asked, states of another row or position, no final norm, files that stay."""
    batch = place(ROWS, 0)
    teacher, live = served(world, server), LiveTeacher(target, TAPS)
    there, here = teacher.get_output(batch), live.get_output(batch)
    inside = torch.zeros_like(batch.loss_mask)
    for row, (line, column) in zip(ROWS, batch.starts, strict=True):
        inside[line, column : column + len(row["input_ids"])] = True
    torch.testing.assert_close(there.features[inside], here.features[inside], rtol=1e-4, atol=1e-5)
    states = there.head_inputs[batch.loss_mask], here.head_inputs[batch.loss_mask]
    torch.testing.assert_close(*map(teacher.head, states), rtol=1e-4, atol=1e-4)
    assert server.most_open <= 2
    assert list(server.folder.iterdir()) == []


def test_a_target_without_layers_has_their_number_and_refuses_to_decode(
    world: World, target: Target
) -> None:
    """Bug: text of a model without layers; its weights are read all the same; heads see a target of no layers."""
    bare = load_target(str(world.target), "cpu", with_layers=False)
    assert bare.runner.config.num_hidden_layers == target.runner.config.num_hidden_layers > 0
    names = [name for name, _ in bare.runner.model.named_parameters()]
    assert len(names) == 3  # embedding, final norm, LM head
    assert not any("layers" in name for name in names)
    with pytest.raises(UserError, match="without its layers"):
        decode(bare, None, [[1, 2, 3]], max_new_tokens=2)


def first_request(
    change: Callable[[dict[str, Any]], None],
) -> Callable[[int, dict[str, Any]], None]:
    return lambda number, tensors: change(tensors) if number == 1 else None


def test_a_missing_file_is_asked_for_again(world: World, server: StatesServer) -> None:
    """Bug: one file that was lost ends the run, or its row has zeros."""
    server.damage = first_request(lambda tensors: tensors.clear())
    output = served(world, server).get_output(batching.collate(ROWS[:1], 0))
    assert server.number == 2
    assert bool((output.features[0, : len(ROWS[0]["input_ids"])].abs().sum(-1) > 0).all())


def swap_token(tensors: dict[str, Any]) -> None:
    tensors["token_ids"] = tensors["token_ids"] + 1


def drop_layer(tensors: dict[str, Any]) -> None:
    tensors["hidden_states"] = tensors["hidden_states"][:, 1:].contiguous()


def reverse_layers(tensors: dict[str, Any]) -> None:
    tensors["hidden_states"] = tensors["hidden_states"].flip(1).contiguous()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(swap_token, "other tokens"), (drop_layer, "of shape"), (reverse_layers, "final state says")],
)
def test_states_of_another_text_or_layer_are_refused(
    world: World, server: StatesServer, damage: Callable[[dict[str, Any]], None], reason: str
) -> None:
    """Bug: a draft learns from the states of other tokens or layers."""
    server.damage = lambda number, tensors: damage(tensors)
    with pytest.raises(UserError, match=reason):
        served(world, server).get_output(batching.collate(ROWS, 0))


def test_only_files_of_the_folder_are_read_and_deleted(
    world: World, server: StatesServer, tmp_path: Path
) -> None:
    """Bug: a server's answer makes the training delete a file elsewhere."""
    outside = tmp_path / "request-1.safetensors"
    outside.write_bytes(b"kept")
    server.name_prefix = f"/../..{tmp_path}"
    served(world, server).get_output(batching.collate(ROWS[:1], 0))
    assert outside.read_bytes() == b"kept"


def test_a_server_for_other_layers_and_a_missing_folder_are_refused(
    world: World, server: StatesServer
) -> None:
    """Bug: taps are taken for those of other layers, or the run waits for files that never come."""
    (server.folder / LAYERS_FILE).write_text(json.dumps({"layers": [0, 2]}))
    with pytest.raises(UserError, match=r"layers \[0, 2\], and this draft needs \[0, 1,"):
        served(world, server)
    bare = load_target(str(world.target), "cpu", with_layers=False)
    with pytest.raises(UserError, match="states.folder"):
        ServedTeacher(bare, TAPS, StatesServerConfig(server.url, str(server.folder / "none")))


def arguments(world: World, data: Path, out: Path) -> list[object]:
    return [
        "--target", world.target, "--data", data, "--out", out, "--draft.family", "eagle3", "--draft.steps", 2,
        "--draft.taps", list(TAPS.layers[::-1]), "--loop.steps", 3, "--loop.batch_size", 4, "--loop.micro_batch", 4,
        "--loop.eval_every", 0, "--loop.warmup", 1,
    ]  # fmt: skip


@pytest.mark.parametrize("stored", [False, True])
def test_a_draft_trained_on_served_states_is_the_one_trained_here(
    world: World, server: StatesServer, tmp_path: Path, stored: bool
) -> None:
    """Bug: the command loads the layers, asks for other taps, or trains on something else than the states."""
    data = worlds.sampled(world, tmp_path / "data", "--max_new_tokens", 12)
    where = ["--states.url", server.url, "--states.folder", server.folder]
    worlds.call("train/distill.py", *arguments(world, data, tmp_path / "here")).ok()
    if stored:
        where += ["--features", tmp_path / "features", "--features_top", 8]
    more = [*arguments(world, data, tmp_path / "served"), *where]
    worlds.call("train/distill.py", *more).ok()
    own, other = (load_file(tmp_path / name / "model.safetensors") for name in ("here", "served"))
    assert own.keys() == other.keys()
    if stored:  # fp8, and only the eight most probable tokens
        assert (tmp_path / "features").is_dir()
        return
    for name, value in own.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--loop.eval_every", 2], "eval_every"),
        (["--dry_run", "true"], "dry_run"),
        (["--draft.family", "medusa2"], "trains the target"),
    ],
)
def test_what_needs_the_layers_is_refused_at_once(
    world: World, server: StatesServer, tmp_path: Path, more: list[object], reason: str
) -> None:
    """Bug: hours of training end at the first measurement."""
    where = ["--states.url", server.url, "--states.folder", server.folder]
    words = arguments(world, tmp_path, tmp_path / "out")
    if "--draft.family" in more:  # which has no settings of the other one
        at = words.index("--draft.family")
        words = words[:at] + words[at + 6 :]
    done = worlds.call("train/distill.py", *words, *where, *more)
    assert done.code == 2
    assert reason in done.error()
