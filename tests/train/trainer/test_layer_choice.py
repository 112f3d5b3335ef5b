"""Which layers a draft keeps: those whose removal costs most, by a plain computation; one choice for every start."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from decode.common.errors import UserError
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.cut_layers import cut_layers
from decode.model.layer_stack import layer_stack
from decode.model.loading import load_model, load_target
from tests import worlds
from tests.hybrids import hybrid_target, tiny_hybrid
from tests.params import slow_except
from tests.tiny import FEW, VOCAB, noisy, reference, tiny_model, tiny_prompts, tiny_target
from tests.train.families.test_causal_init import rows_of
from tests.train.test_distill_command import COMMAND, WEIGHTS, arguments, distill, facts_of
from tests.worlds import Done, World
from train.data import batching
from train.data.mixture import Mixture
from train.families.base import FamilyContext
from train.families.causal import TrainableCausal, check_layers
from train.families.settings.causal import CausalSettings
from train.planning.shape_run import ShapeRun
from train.trainer import layer_choice
from train.trainer.layer_choice import (
    CHOICE_FILE,
    LayerChoice,
    LayerTrials,
    choose_texts,
    read_choice,
)
from train.trainer.settings import DistillConfig

QUIET = Console(quiet=True)
ROWS = rows_of(12, 20, 9, 15)
IDS = list(range(1, VOCAB, 3))


# ---- what is chosen ----


def choose(model: Any, target: Any, keep: int, ids: list[int] | None = None) -> LayerChoice:
    """What is chosen for `model` as draft of `target`, on ROWS."""
    trainee = TrainableCausal.__new__(TrainableCausal)
    context = FamilyContext(DistillConfig(), target, ROWS)
    trainee.lm, trainee.teacher = model.train(), context.teacher(None)
    trainee.ids = None if ids is None else torch.tensor(ids)
    found = LayerTrials(trainee, ROWS).choose(
        keep, None, Accelerator(cpu=True), QUIET, lambda _: None
    )
    assert model.training
    return found


def mean_overlap(model: Any, target: Any, ids: list[int] | None = None) -> float:
    """The mean of sum min(p, q), by plain passes of both models over each row."""
    total, count = 0.0, 0
    columns = list(range(VOCAB)) if ids is None else ids
    for row in ROWS:
        tokens, at = torch.tensor([row["input_ids"]]), batching.supervised_positions(row)
        with torch.inference_mode():
            p, q = (m(input_ids=tokens, use_cache=False).logits[0, at] for m in (target, model))
        p, q = p.softmax(-1)[:, columns], q[:, columns].softmax(-1)
        total, count = total + float(torch.minimum(p, q).sum()), count + len(at)
    return total / count


def greedy_by_hand(
    model: Any, target: Any, keep: int, ids: list[int] | None
) -> list[tuple[int, float]]:
    """(layer, acceptance without it) of each removal, by cutting a copy for each candidate."""
    kept, found = list(range(len(layer_stack(model)))), []
    while len(kept) > keep:
        scores = {}
        for layer in kept:
            candidate = copy.deepcopy(model)
            cut_layers(candidate, [i for i in kept if i != layer])
            scores[layer] = mean_overlap(candidate, target, ids)
        best = max(scores, key=scores.__getitem__)
        kept.remove(best)
        found.append((best, scores[best]))
    return found


@pytest.mark.parametrize("ids", [None, IDS], ids=["whole", "reduced"])
@pytest.mark.parametrize(
    "arch",
    slow_except(
        ["llama", "gemma3_text", "gpt2", "gpt_oss", "phi", "gemma2", "opt"], FEW[:2] + ["phi"]
    ),
)
def test_the_choice_is_that_of_cut_copies(arch: str, ids: list[int] | None) -> None:
    """Catches an acceptance of another model, of other positions or tokens, dropout, and a removal that is not the
    cheapest one or counts layers anew after the one before."""
    changes: dict[str, Any] = {"num_hidden_layers": 4}
    if arch in ("gemma3_text", "gpt_oss", "gemma2"):
        kinds = ["sliding_attention", "full_attention"] * 2
        changes["layer_types"] = kinds
    model = tiny_model(arch, std=0.15, **changes)
    draft = noisy(model, 0.02)
    want = greedy_by_hand(reference(draft), reference(model), 1, ids)
    before = mean_overlap(reference(draft), reference(model), ids)
    found = choose(draft, tiny_target(model), 1, ids)
    assert [one["layer"] for one in found.removed] == [layer for layer, _ in want]
    got = [one["acceptance"] for one in found.removed]
    assert got == pytest.approx([value for _, value in want], abs=1e-5)
    assert found.acceptance == pytest.approx(before, abs=1e-5)
    assert found.tokens == batching.supervised_token_count(ROWS)
    assert found.kept == [i for i in range(4) if i not in [layer for layer, _ in want]]


def silence(model: Any, layer: int, share: float = 0.0) -> None:
    """Makes a layer of a Llama or GPT-2 add `share` of what it adds: none, or hardly anything."""
    ends = ("o_proj", "down_proj", "c_proj")
    with torch.no_grad():
        for name, value in layer_stack(model)[layer].named_parameters():
            if any(f"{end}." in name for end in ends):
                value *= share


@pytest.mark.parametrize(
    ("arch", "idle", "share"),
    [
        ("llama", [1, 3], 0.0),
        ("llama", [0, 4], 0.0),
        ("llama", [2, 3], 0.0),
        ("llama", [4], 1e-3),
        ("gemma3_text", [0, 3], 0.0),
        ("gpt2", [1, 2], 0.0),
    ],
)
def test_layers_that_do_nothing_go_first(arch: str, idle: list[int], share: float) -> None:
    """Catches another layer that goes, as evenly spaced ones would; without idle ones acceptance stays."""
    changes: dict[str, Any] = {"num_hidden_layers": 5}
    if arch == "gemma3_text":
        changes["layer_types"] = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    model = tiny_model(arch, **changes)
    for layer in idle:
        if arch == "gemma3_text":  # norms behind both sub-layers: 1 + weight
            own = layer_stack(model)[layer]
            for norm in (own.post_attention_layernorm, own.post_feedforward_layernorm):
                torch.nn.init.constant_(norm.weight, -1.0)
        else:
            silence(model, layer, share)
    found = choose(noisy(model, 0.0), tiny_target(model), 5 - len(idle))
    assert sorted(one["layer"] for one in found.removed) == idle
    assert found.acceptance == pytest.approx(1.0, abs=1e-5)
    tolerance = 0.05 if share else 1e-5
    assert [one["acceptance"] for one in found.removed] == pytest.approx(
        [1.0] * len(idle), abs=tolerance
    )


def test_it_goes_on_where_it_stopped() -> None:
    """Catches a second start that forgets what went, or tries it again."""
    model = tiny_model("llama", num_hidden_layers=5, std=0.15)
    target, saved = tiny_target(model), []
    trainee = TrainableCausal.__new__(TrainableCausal)
    trainee.lm, trainee.ids = noisy(model, 0.02), None
    trainee.teacher = FamilyContext(DistillConfig(), target, ROWS).teacher(None)

    def run(keep: int, begun: LayerChoice | None) -> LayerChoice:
        saved.clear()
        return LayerTrials(trainee, ROWS).choose(
            keep, begun, Accelerator(cpu=True), QUIET, lambda c: saved.append(len(c.removed))
        )

    straight = run(1, None)
    assert saved == [1, 2, 3, 4]
    stopped = run(3, None)
    assert run(1, copy.deepcopy(stopped)) == straight
    assert saved == [3, 4]
    assert stopped.removed == straight.removed[:2]


def test_ranks_that_share_the_texts_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a rank that decides by its own texts: here rank 0 gets what both summed."""
    monkeypatch.setattr(layer_choice, "CPU_MICROBATCH_TOKENS", 20)
    model = tiny_model("llama", num_hidden_layers=4, std=0.15)
    target, whole = tiny_target(model), choose(noisy(model, 0.02), tiny_target(model), 2)
    trainee = TrainableCausal.__new__(TrainableCausal)
    trainee.lm, trainee.ids = noisy(model, 0.02), None
    trainee.teacher = FamilyContext(DistillConfig(), target, ROWS).teacher(None)
    trials = LayerTrials(trainee, ROWS)
    assert len(trials.groups) > 2
    kept = list(range(4))
    sums = torch.zeros(5, dtype=torch.float64)
    for rank in (0, 1):
        for group in trials.groups[rank::2]:
            batch = batching.collate(group, pad_id=0)
            teacher = trainee.teacher.get_output(batch).head_inputs[batch.loss_mask]
            with torch.no_grad():
                sums += torch.tensor(trials.overlaps(batch, teacher, kept, lambda: None))
    assert float(sums[4] / trials.tokens) == pytest.approx(whole.acceptance, abs=1e-6)
    assert int(sums[:4].argmax()) == whole.removed[0]["layer"]


@pytest.mark.parametrize(
    "arch", slow_except(["qwen3_next", "nemotron_h", "bamba", "falcon_h1"], ["qwen3_next", "bamba"])
)
def test_recurrent_models_are_measured_too(arch: str) -> None:
    """Catches layers that return several values, or are chosen by attributes that a left-out one lacks."""
    model = tiny_hybrid(arch, std=0.15)
    count, target = len(layer_stack(model)), hybrid_target(model)
    found = choose(copy.deepcopy(model), target, count - 1)
    candidate = copy.deepcopy(model)
    cut_layers(candidate, found.kept)
    [removed] = found.removed
    assert removed["acceptance"] == pytest.approx(mean_overlap(candidate, model), abs=1e-4)
    assert found.acceptance == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("step", "first"), [(2, [4, 5]), (3, [3, 4, 5])])
def test_a_layer_goes_only_where_a_config_describes_the_rest(step: int, first: list[int]) -> None:
    """Catches a draft that is measured, trained, and then cannot be saved: experts in every second or third layer stay
    there only if layers behind the last go, or none before it."""
    model = tiny_model("qwen3_moe", num_hidden_layers=6, std=0.15, decoder_sparse_step=step)
    for layer in range(6):
        silence(model, layer, 0.5 if layer in first else 0.0)  # layers at the end cost most
    found = choose(noisy(model, 0.0), tiny_target(model), 5)
    [gone] = [one["layer"] for one in found.removed]
    assert gone in first
    cut_layers(model, found.kept)


def test_a_model_of_which_no_layer_can_go_is_refused_at_once() -> None:
    """Catches an hour of measuring before the refusal."""
    model = tiny_model("gemma4_text")
    with pytest.raises(UserError, match="gemma4_text model cannot be cut"):
        check_layers(model, CausalSettings(keep_layers=2))
    check_layers(model, CausalSettings())
    check_layers(tiny_model("qwen3_moe", decoder_sparse_step=2), CausalSettings(keep_layers=2))


def test_layers_that_pass_more_than_states_are_refused() -> None:
    """Catches a measurement of models that are not those which would be trained."""
    model = tiny_hybrid("zaya")
    with pytest.raises(UserError, match="zaya model pass more than hidden states") as found:
        choose(copy.deepcopy(model), hybrid_target(model), 1)
    assert "draft.layers" in str(found.value)


def test_texts_are_those_trained_on_first_until_there_are_enough_tokens() -> None:
    """Catches another order than training's, one text for all tokens, and an endless loop over a small set."""
    rows = Mixture([rows_of(12, 20, 9, 15, 30, 8)], [1.0])
    order = [row["id"] for row in rows.global_batch(6, 3, 0)]
    assert [row["id"] for row in choose_texts(rows, 1, 3)] == order[:1]
    some = choose_texts(rows, 30, 3)
    assert [row["id"] for row in some] == order[: len(some)]
    assert batching.supervised_token_count(some[:-1]) < 30 <= batching.supervised_token_count(some)
    assert len(choose_texts(rows, 10_000, 3)) == 6


# ---- the command ----

KEEP = ["--draft.keep_layers", 2, "--draft.choice_tokens", 200]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Layers 1 and 3 of the draft do nothing."""
    made = worlds.build(tmp_path_factory.mktemp("world"), layers=4)
    model = AutoModelForCausalLM.from_pretrained(made.draft)
    for layer in (1, 3):
        silence(model, layer)
    model.save_pretrained(made.draft)
    return made


@pytest.fixture(scope="module")
def data(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.sampled(world, tmp_path_factory.mktemp("data"), "--max_new_tokens", 40)


@pytest.fixture(scope="module")
def straight(world: World, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from start to end."""
    out = tmp_path_factory.mktemp("straight") / "out"
    done = distill(world, data, out, *KEEP).ok()
    assert "4 layers to 2, 7 models to try on" in done.err
    return out


@pytest.fixture
def train(world: World, data: Path, tmp_path: Path) -> Callable[..., Done]:
    return lambda *more: distill(world, data, tmp_path / "out", *more)


def choice_in(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / CHOICE_FILE).read_text())["choice"]
    return found


def test_idle_layers_of_the_init_go(world: World, straight: Path) -> None:
    """Catches layers of the target in place of the init's, a choice that is not followed, and facts that say less."""
    assert sorted(one["layer"] for one in choice_in(straight)["removed"]) == [1, 3]
    facts = facts_of(straight)
    assert facts["layer_choice"] == {**choice_in(straight), "kept": [0, 2]}
    assert facts["layer_choice"]["depth"] == 4
    assert facts["layer_choice"]["tokens"] >= 200
    assert facts["training"]["draft"]["keep_layers"] == 2
    model = AutoModelForCausalLM.from_pretrained(straight)
    assert model.config.num_hidden_layers == len(model.model.layers) == 2


def test_it_is_the_run_that_names_these_layers(
    straight: Path, train: Callable[..., Done], tmp_path: Path
) -> None:
    """Catches a measurement that leaves traces in the draft, in the order of the samples or in random states."""
    train("--draft.layers", "[0, 2]").ok()
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (straight / WEIGHTS).read_bytes()
    assert not (tmp_path / "out" / CHOICE_FILE).exists()
    assert "layer_choice" not in facts_of(tmp_path / "out")


def test_layers_named_are_those_of_the_init(
    world: World, train: Callable[..., Done], tmp_path: Path
) -> None:
    train("--draft.layers", "[1, 2]", "--loop.lr", 1e-30).ok()
    own, init = load_file(tmp_path / "out" / WEIGHTS), load_file(world.draft / WEIGHTS)
    for new, old in ((0, 1), (1, 2)):
        name = "model.layers.{}.mlp.up_proj.weight"
        assert torch.equal(own[name.format(new)], init[name.format(old)])
    assert torch.equal(own["lm_head.weight"], init["lm_head.weight"])


@pytest.mark.parametrize("when", [CHOICE_FILE, "checkpoints/latest"])
def test_a_stopped_run_does_not_choose_again(
    when: str, world: World, data: Path, straight: Path, tmp_path: Path
) -> None:
    """Catches a second start that measures again what is there, or ends with other weights."""
    out = tmp_path / "out"
    command = [*arguments(world, data, out), *KEEP]
    assert worlds.kill_when((out / when).is_file, COMMAND, *command) == -9
    before = choice_in(out)
    done = worlds.call(COMMAND, *command).ok()
    left = 2 - len(before["removed"])
    assert ("models to try" in done.err) == (left > 0)
    assert choice_in(out)["removed"][: len(before["removed"])] == before["removed"]
    assert choice_in(out) == choice_in(straight)
    assert (out / WEIGHTS).read_bytes() == (straight / WEIGHTS).read_bytes()


@pytest.mark.slow
def test_two_processes_choose_the_same(
    world: World, data: Path, straight: Path, tmp_path: Path
) -> None:
    """Catches ranks that wait for each other or train different layers."""
    out = tmp_path / "out"
    worlds.fork(COMMAND, *arguments(world, data, out), *KEEP, processes=2).ok()
    assert facts_of(out)["layer_choice"]["kept"] == [0, 2]


def test_stored_features_give_the_choice_too(train: Callable[..., Done], tmp_path: Path) -> None:
    """Catches features that are read before they are there."""
    train(*KEEP, "--features", tmp_path / "features", "--loop.steps", 1).ok()
    assert facts_of(tmp_path / "out")["layer_choice"]["kept"] == [0, 2]


def test_layers_of_the_target_itself_with_some_tokens(
    world: World, train: Callable[..., Done], tmp_path: Path
) -> None:
    """Catches keep_layers without init, whose acceptance is bound by the tokens that can be drafted, and text that is
    not the target's."""
    train("--draft.init", "", *KEEP, "--draft.vocab", 60).ok()
    facts = facts_of(tmp_path / "out")
    assert 0.3 < facts["layer_choice"]["acceptance"] <= 1
    assert facts["vocabulary"]["size"] == 60
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 2
    target = load_target(str(world.target), "cpu")
    assert target.runner.config.num_hidden_layers == 4
    prompts = tiny_prompts(9, 14, vocab=200)
    texts = [
        [o.output_ids for o in decode(target, draft, prompts, k=3, max_new_tokens=12)]
        for draft in (None, load_draft(str(tmp_path / "out"), target))
    ]
    assert texts[0] == texts[1]


def test_adapters_are_those_of_the_cut_model(
    world: World, train: Callable[..., Done], tmp_path: Path
) -> None:
    """Catches adapters on layers that go, and an adapter folder that names the whole model as its base."""
    train(*KEEP, "--draft.lora_rank", 2).ok()
    assert facts_of(tmp_path / "out")["layer_choice"]["kept"] == [0, 2]
    assert not (tmp_path / "out" / "adapter").exists()
    own, init = load_file(tmp_path / "out" / WEIGHTS), load_file(world.draft / WEIGHTS)
    assert not any("lora" in name for name in own)
    names = [n for n in init if ".layers." not in n]
    assert all(torch.equal(own[n], init[n]) for n in names)
    name = "model.layers.{}.mlp.up_proj.weight"
    assert not torch.equal(own[name.format(1)], init[name.format(2)])
    close = (own[name.format(1)] - init[name.format(2)]).norm()
    assert float(close) < float((own[name.format(1)] - init[name.format(1)]).norm())


def test_pard_drafts_are_cut_too(train: Callable[..., Done], tmp_path: Path) -> None:
    train(*KEEP, "--draft.family", "pard", "--draft.block", 3).ok()
    facts = facts_of(tmp_path / "out")
    assert (facts["family"], facts["layer_choice"]["kept"]) == ("pard", [0, 2])


def test_a_dry_run_chooses_nothing(train: Callable[..., Done], tmp_path: Path) -> None:
    """Catches a rehearsal that measures for an hour, or of the whole model."""
    whole = train("--dry_run", "true")
    done = train(*KEEP, "--dry_run", "true").ok()
    assert "layers [1, 3] stand for those" in done.err
    assert "models to try" not in done.err
    found, every = (json.loads(d.out.splitlines()[-1]) for d in (done, whole))
    assert found["estimated"]["trained"] < every["estimated"]["trained"]
    assert found["measured"]["draft_bytes"] < 0.8 * every["measured"]["draft_bytes"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--draft.keep_layers", 4], "the model has 4 layers"),
        (["--draft.keep_layers", 9], "the model has 4 layers"),
        (["--draft.keep_layers", -1], "draft.keep_layers"),
        (["--draft.keep_layers", 2, "--draft.layers", "[0, 1]"], "draft.keep_layers has them chosen"),
        (["--draft.keep_layers", 2, "--draft.choice_tokens", 0], "choice_tokens"),
        (["--draft.init", "", "--draft.keep_layers", 2, "--draft.init_config", "{n: 3}"], "give one of"),
        (["--draft.layers", "[4]"], "[4]: name layers of 0 … 3"),
        (["--draft.layers", "[2, 1]"], "[2, 1]: name layers"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_one_line(
    train: Callable[..., Done], tmp_path: Path, wrong: list[Any], named: str
) -> None:
    """Catches a traceback, or a folder that is claimed first."""
    assert named in train(*wrong).error()
    assert not (tmp_path / "out").exists()


def test_the_estimate_counts_the_layers_that_stay(world: World) -> None:
    """Catches a dry run that counts the whole init."""
    target = load_target(str(world.target), "cpu").runner.config
    runs = [
        ShapeRun(DistillConfig(draft=CausalSettings(init=str(world.draft), **how)), target)
        for how in ({}, {"layers": [0, 2]}, {"keep_layers": 2})
    ]
    body = load_model(str(world.draft), "draft", "cpu", "float32").get_decoder().layers
    half = sum(p.numel() for layer in (body[1], body[3]) for p in layer.parameters())
    whole, named, chosen = (run.trained for run in runs)
    assert (named, chosen) == (whole - half, whole - half)


# ---- the choice of another run ----

KEY = {"keep_layers": 2, "data": ["a"]}
MADE = LayerChoice(4, 100, 0.9, [{"layer": 1, "acceptance": 0.8}, {"layer": 3, "acceptance": 0.7}])


def write_choice(out: Path, key: dict[str, Any], choice: Any, trained: bool) -> None:
    out.mkdir(exist_ok=True)
    (out / CHOICE_FILE).write_text(json.dumps({"key": key, "choice": choice}))
    if trained:
        (out / "checkpoints" / "step-000002").mkdir(parents=True)
        (out / "checkpoints" / "latest").write_text("step-000002\n")


@pytest.mark.parametrize("trained", [False, True])
def test_inputs_decide_before_the_first_checkpoint(trained: bool, tmp_path: Path) -> None:
    """Catches a choice made from other samples, and weights of chosen layers that go on as others."""
    write_choice(tmp_path, KEY, vars(MADE), trained)
    assert read_choice(tmp_path, KEY) == MADE
    other = read_choice(tmp_path, {**KEY, "data": ["b"]})
    assert other == (MADE if trained else None)


@pytest.mark.parametrize(
    ("key", "choice", "named"),
    [
        ({**KEY, "keep_layers": 1}, vars(MADE), "has 2 layers, not draft.keep_layers 1"),
        ({**KEY, "keep_layers": 3}, vars(MADE), "has 2 layers, not draft.keep_layers 3"),
        (KEY, {**vars(MADE), "removed": vars(MADE)["removed"][:1]}, "has 3 layers"),
        (KEY, {"depth": 4}, "is damaged"),
        (KEY, {**vars(MADE), "removed": [{}]}, "is damaged"),
        (KEY, [], "is damaged"),
    ],
)
def test_a_checkpoint_of_other_layers_is_refused(
    key: dict[str, Any], choice: Any, named: str, tmp_path: Path
) -> None:
    write_choice(tmp_path, KEY, choice, trained=True)
    with pytest.raises(UserError, match=named) as found:
        read_choice(tmp_path, key)
    assert "--overwrite true" in str(found.value)


def test_a_checkpoint_whose_choice_is_lost_is_refused(tmp_path: Path) -> None:
    """Catches weights that get the config of other layers."""
    write_choice(tmp_path, KEY, vars(MADE), trained=True)
    (tmp_path / CHOICE_FILE).unlink()
    with pytest.raises(UserError, match=f"no {CHOICE_FILE} tells"):
        read_choice(tmp_path, KEY)
