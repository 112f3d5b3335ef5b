"""train/distill.py as users run it, on tiny models: exact after a kill, equal on two processes, safe on bad input."""

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from decode.common.errors import UserError
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import Target
from tests import worlds
from tests.tiny import tiny_model
from tests.worlds import Done, World, contents
from train.data import batching, mixture, sample_store
from train.data.manifest import read_manifest
from train.data.mixture import Mixture
from train.families.settings.causal import CausalSettings
from train.trainer import loop
from train.trainer.settings import DistillConfig
from train.training import build_draft

COMMAND = "train/distill.py"
STEPS = 8
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def undisturbed(world: World, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that one process trained from start to end."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    distill(world, data, out).ok()
    return out


@pytest.fixture
def train(world: World, data: Path, tmp_path: Path) -> Callable[..., Done]:
    """Trains into tmp_path / "out"."""
    return lambda *more: distill(world, data, tmp_path / "out", *more)


def arguments(world: World, data: Path, out: Path) -> list[object]:
    """Every step is logged, every second one saved, every fourth one measured."""
    return [
        "--target", world.target, "--data", data, "--draft.init", world.draft, "--out", out,
        "--loop.steps", STEPS, "--loop.batch_size", 8, "--loop.micro_batch", 8, "--loop.warmup", 2,
        "--loop.lr", 3e-3, "--loop.log_every", 1, "--loop.save_every", 2, "--loop.eval_every", 4,
        "--check.prompts", 3, "--check.max_new_tokens", 4,
    ]  # fmt: skip


def distill(world: World, data: Path, out: Path, *more: object) -> Done:
    return worlds.call(COMMAND, *arguments(world, data, out), *more)


def metrics_of(out: Path, *names: str) -> list[tuple[int, ...]]:
    """(step, value of each name) of the lines of metrics.jsonl that have them, in order."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(x["step"], *(x[n] for n in names)) for x in lines if set(names) <= x.keys()]


def losses_of(out: Path) -> list[float]:
    """The loss of every step; asserts that each is there once and in order."""
    found = metrics_of(out, "train/loss")
    assert [step for step, _ in found] == list(range(1, len(found) + 1))
    return [loss for _, loss in found]


def facts_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "draftsmith.json").read_text())


def assert_same_run(out: Path, undisturbed: Path) -> None:
    """Weights equal bit for bit, and the log tells the same story."""
    assert (out / WEIGHTS).read_bytes() == (undisturbed / WEIGHTS).read_bytes()
    for names in (["train/loss", "train/grad_norm", "train/lr"], ["accept/tau", "accept/alpha"]):
        assert metrics_of(out, *names) == metrics_of(undisturbed, *names)
    assert len(losses_of(out)) == STEPS


# ---- the same result, whatever happens ----


def test_attention_in_blocks_and_layers_computed_again_change_nothing(
    undisturbed: Path, train: Callable[..., Done], tmp_path: Path
) -> None:
    """Bug: settings for long samples that do not reach training, or that change what is learned."""
    done = train(
        "--draft.attention", "blockwise", "--draft.activation_checkpointing", "true",
        "--loop.pack", "true", "--loop.eval_every", 0,
    ).ok()  # fmt: skip
    assert "not used" not in done.err
    assert losses_of(tmp_path / "out") == pytest.approx(losses_of(undisturbed), rel=1e-4)


def test_flex_attention_without_a_gpu_is_refused(train: Callable[..., Done]) -> None:
    """Bug: an error of torch in the first backward pass, in place of what to choose."""
    done = train("--draft.attention", "flex")
    assert done.code == 2
    assert "blockwise" in done.err


def test_killed_and_started_again_ends_with_the_same_bits(
    world: World, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Bug: after a kill other batches, a fresh optimiser or a half-written checkpoint change the draft."""
    out = tmp_path / "out"
    pointer = out / "checkpoints" / "latest"
    words = arguments(world, data, out)
    assert worlds.kill_when(pointer.is_file, COMMAND, *words, own_start=True) == -9
    assert not (out / WEIGHTS).exists()
    done = distill(world, data, out).ok()
    assert "from step 0" not in done.err
    assert_same_run(out, undisturbed)


@pytest.mark.slow
def test_killed_over_and_over_it_still_ends_with_the_same_bits(
    world: World, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Bug: only the first resumption is exact, or what a kill leaves behind stops the next start."""
    out = tmp_path / "out"
    checkpoints = out / "checkpoints"

    def newest() -> str:
        return max((path.name for path in checkpoints.glob("step-??????")), default="")

    def once() -> int:
        found = newest()
        return worlds.kill_when(lambda: newest() > found, COMMAND, *arguments(world, data, out))

    kills = 0
    while once() != 0:
        kills += 1
        assert kills < 2 * STEPS
    assert kills >= 2
    assert_same_run(out, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "step"),
    [("run.yaml", 0), ("step-000004", 2), ("latest", 2), ("draftsmith.json", STEPS)],
)
def test_killed_just_before_a_rename(
    train: Callable, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str,
    step: int,
) -> None:  # fmt: skip
    """Bug: a checkpoint that is not complete, or not yet the latest, is gone on from, or what is left is in the way."""
    saved = tmp_path / "out" / "checkpoints" / "step-000004"
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if self.name == f"{file}.tmp" and (saved.exists() or file != "latest"):
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        assert train().code == 130
    assert len(list(tmp_path.rglob(f"{file}.tmp"))) == 1
    done = train().ok()
    assert f"from step {step}" in done.err
    assert_same_run(tmp_path / "out", undisturbed)
    assert list(tmp_path.rglob("*.tmp")) == []


def test_lines_of_the_log_do_not_depend_on_a_kill(train: Callable, tmp_path: Path) -> None:
    """Bug: a line that covers steps on both sides of the kill averages over the later ones only."""
    settings = ["--loop.log_every", 4, "--loop.save_every", 3, "--loop.eval_every", 0]
    assert train(*settings).code == 0
    whole = metrics_of(tmp_path / "out", "train/loss")
    latest = tmp_path / "out" / "checkpoints" / "latest"
    latest.write_text("step-000006\n")  # as if killed after step 6
    assert train(*settings).code == 0
    assert metrics_of(tmp_path / "out", "train/loss") == whole


def test_dropout_goes_on_where_it_was(world: World, train: Callable, tmp_path: Path) -> None:
    """Bug: random states are not restored, or are saved at another moment than the weights."""
    tokenizer = worlds.byte_tokenizer()
    size: dict[str, Any] = {"vocab_size": len(tokenizer), "max_position_embeddings": worlds.CONTEXT}
    model = tiny_model("gpt2", resid_pdrop=0.2, embd_pdrop=0.2, num_hidden_layers=1, **size)
    settings = ["--draft.init", worlds.save(tmp_path / "gpt2", model, tokenizer)]
    out = tmp_path / "out"
    assert train(*settings).code == 0
    whole = (out / WEIGHTS).read_bytes()
    (out / "checkpoints" / "latest").write_text("step-000006\n")  # as if killed after step 6
    assert "from step 6" in train(*settings).err
    assert (out / WEIGHTS).read_bytes() == whole
    assert train(*settings, "--seed", 1, "--overwrite", "true").code == 0
    assert (out / WEIGHTS).read_bytes() != whole


def test_a_finished_run_is_left_as_it_is(
    train: Callable, undisturbed: Path, tmp_path: Path
) -> None:
    """Bug: the same command again trains on, or writes another draft."""
    assert train().code == 0
    done = train().ok()
    assert f"from step {STEPS}" in done.err
    assert_same_run(tmp_path / "out", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "steps"),
    [
        (("--loop.steps", 4), 8),
        (("--loop.steps", 8), 8),
        (("--loop.epochs", 1), 8),  # fewer steps than are done
        (("--loop.steps", 10), 10),
    ],
)
def test_resumed_with_other_steps_it_says_those_of_its_weights(
    world: World,
    data: Path,
    undisturbed: Path,
    tmp_path: Path,
    more: tuple[object, ...],
    steps: int,
) -> None:
    """Catches a last line that says fewer steps than the saved draft has."""
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    done = distill(world, data, out, *more, "--resume", "true").ok()
    facts = facts_of(out)
    assert (json.loads(done.out.splitlines()[-1])["steps"], facts["trained_steps"]) == (steps,) * 2
    said = f"and {steps} steps are done already: the draft is theirs"
    assert (said in done.err) == (facts["training"]["loop"]["steps"] < steps)
    same = (out / WEIGHTS).read_bytes() == (undisturbed / WEIGHTS).read_bytes()
    assert same == (steps == STEPS)


def test_a_draft_whose_training_has_not_ended_says_so(
    undisturbed: Path, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches "holds no config.json" for a training that was stopped, and an older draft that is measured for it."""
    draft = tmp_path / "out"
    shutil.copytree(undisturbed, draft)
    load_draft(str(draft), target)
    assert "training" not in capsys.readouterr().err
    with pytest.raises(UserError, match=f"is a checkpoint of a training: name the folder {draft}"):
        load_draft(str(draft / "checkpoints" / "step-000008"), target)
    (draft / "checkpoints" / "latest").write_text("step-000012\n")
    load_draft(str(draft), target)
    said = "is that of step 8, and its training has not ended: it has gone on to step 12 since"
    assert said in capsys.readouterr().err
    (draft / "draftsmith.json").unlink()
    with pytest.raises(UserError, match="its training has not ended, 12 steps are saved and no"):
        load_draft(str(draft), target)
    shutil.rmtree(draft / "checkpoints")
    with pytest.raises(UserError, match="its training has not ended, 0 steps are saved and no"):
        load_draft(str(draft), target)


def test_two_processes_equal_one(
    world: World, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Bug: gradients are averaged over processes with unequal token counts, those of losses in chunks are exchanged
    too early or not at all, or one process ran and nobody noticed. AdamW hides a wrong scale of the gradient, so its
    norm is compared too."""
    out = tmp_path / "out"
    command = worlds.ROOT / COMMAND
    worlds.fork("tests/in_chunks.py", command, *arguments(world, data, out), processes=2).ok()
    assert facts_of(out)["processes"] == 2
    assert facts_of(undisturbed)["processes"] == 1
    assert losses_of(out) == pytest.approx(losses_of(undisturbed), abs=1e-5)
    assert norms_of(out) == pytest.approx(norms_of(undisturbed), rel=1e-4)


def test_micro_batches_do_not_change_the_result(
    train: Callable, undisturbed: Path, tmp_path: Path
) -> None:
    """Bug: each micro-batch is divided by its own token count; rows are unequal, so that shows."""
    assert train("--loop.micro_batch", 2).code == 0
    assert losses_of(tmp_path / "out") == pytest.approx(losses_of(undisturbed), abs=1e-5)
    assert norms_of(tmp_path / "out") == pytest.approx(norms_of(undisturbed), rel=1e-4)


def norms_of(out: Path) -> list[float]:
    return [norm for _, norm in metrics_of(out, "train/grad_norm")]


def test_answers_are_of_unequal_length(data: Path) -> None:
    """Guards the two tests above: with equal lengths a wrong normalisation would go unseen."""
    spans = [row["loss_spans"][0] for row in sample_store.read_shards(data)]
    lengths = {end - start for start, end in spans}
    assert min(lengths) < 5 < 30 < max(lengths)


# ---- learning ----


def test_the_loss_falls_and_acceptance_rises(train: Callable, tmp_path: Path) -> None:
    """Bug: the sign of the loss, a frozen optimiser, or labels that are shifted by one."""
    train(
        "--loop.steps", 40, "--loop.lr", 1e-2, "--loop.batch_size", 16, "--loop.micro_batch", 16,
        "--loop.save_every", 40, "--loop.eval_every", 40,
    ).ok()  # fmt: skip
    losses = losses_of(tmp_path / "out")
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    overlaps = [overlap for _, overlap in metrics_of(tmp_path / "out", "train/overlap")]
    assert sum(overlaps[-5:]) > sum(overlaps[:5]) + 0.1 * 5


def test_every_parameter_moves(world: World, undisturbed: Path) -> None:
    """Bug: a part of the draft is not trained."""
    before, after = load_file(world.draft / WEIGHTS), load_file(undisturbed / WEIGHTS)
    assert before.keys() == after.keys()
    assert [name for name in before if torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize("layers", [[1], [0, 1]])
def test_a_draft_cut_from_the_target(
    world: World, data: Path, target: Target, tmp_path: Path, layers: list[int]
) -> None:
    """Bug: the cut keeps other layers, saves a config that does not fit them, or changes the target."""
    out = tmp_path / "out"
    settings = ["--draft.init", "", "--draft.layers", json.dumps(layers), "--loop.lr", 1e-30]
    distill(world, data, out, *settings).ok()
    draft = AutoModelForCausalLM.from_pretrained(out)
    assert draft.config.num_hidden_layers == len(draft.model.layers) == len(layers)
    weights, own = load_file(world.target / WEIGHTS), load_file(out / WEIGHTS)
    for number, layer in enumerate(layers):
        name = "model.layers.{}.mlp.up_proj.weight"
        assert torch.equal(own[name.format(number)], weights[name.format(layer)])
    accepted = sum(a for o in answers(target, str(out)) for _, a in o.rounds)
    drafted = sum(d for o in answers(target, str(out)) for d, _ in o.rounds)
    assert (accepted == drafted) == (layers == [0, 1])  # the whole target agrees with itself


def answers(target: Target, draft: str | None) -> list[Any]:
    prompts = [target.tokenizer(text)["input_ids"] for text in ("zq one", "zq and another", "q")]
    loaded = None if draft is None else load_draft(draft, target)
    return decode(target, loaded, prompts, k=3, max_new_tokens=16)


# ---- the draft directory ----


def test_the_saved_draft_loads_and_decodes_losslessly(target: Target, undisturbed: Path) -> None:
    """Bug: the draft that was trained is not the one that was saved, or needs files that are not there."""
    drafted = answers(target, str(undisturbed))
    assert [o.output_ids for o in drafted] == [o.output_ids for o in answers(target, None)]
    assert sum(a for o in drafted for _, a in o.rounds) > 0
    plain = AutoModelForCausalLM.from_pretrained(undisturbed)
    saved = load_file(undisturbed / WEIGHTS)
    assert all(torch.equal(value, saved[name]) for name, value in plain.state_dict().items())
    last = undisturbed / "checkpoints" / f"step-{STEPS:06d}" / WEIGHTS
    kept = {name.removeprefix("lm."): value for name, value in load_file(last).items()}
    assert kept.keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in kept.items())


def test_facts_tell_how_the_draft_was_made(world: World, data: Path, undisturbed: Path) -> None:
    """Bug: a draft cannot be traced to its target, data and settings, or says a checksum that is not its own."""
    facts = facts_of(undisturbed)
    assert facts["family"] == "causal"
    assert facts["target"]["name"] == str(world.target)
    assert facts["tokenizer_hash"] == read_manifest(data).tokenizer_hash
    assert facts["training"]["loop"]["steps"] == STEPS
    manifest = json.loads((data / "manifest.json").read_text())
    assert {**facts["data_manifest"], "shards": manifest["shards"]} == manifest
    assert facts["samples"] == len(sample_store.read_shards(data))
    assert facts["measured_in_training"]["accept/tau"] >= 1
    assert {"argv", "git", "versions", "hardware"} <= facts.keys()
    files = [undisturbed / WEIGHTS, undisturbed / "config.json"]
    own = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    assert facts["draft_sha256"] == own


def test_prompts_are_learned_where_asked_for(world: World, data: Path, tmp_path: Path) -> None:
    """Bug: the setting is ignored, or the first token of a text, which nothing predicts, is a label."""
    rows = sample_store.read_shards(data)
    taken = mixture.Mixture([rows], [1.0]).global_batch(16, 0, 0)
    every, answers = tmp_path / "all", tmp_path / "answers"
    for out, supervise in ((every, "all"), (answers, "answers")):
        distill(world, data, out, "--loop.steps", 2, "--supervise", supervise).ok()
    learned = sum(len(row["input_ids"]) - 1 for row in taken)
    assert facts_of(every)["cost"]["tokens"] == learned
    assert facts_of(answers)["cost"]["tokens"] == batching.supervised_token_count(taken) < learned


# ---- bad input destroys nothing ----


@pytest.mark.parametrize("save_every", [4, 1])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_every: int
) -> None:
    """Bug: a diverged run goes on for hours, or its weights replace the last good ones. The step that ruins the
    weights still has a finite loss, so with save_every 1 it is easily saved."""
    out = tmp_path / "out"
    assert train("--loop.steps", 2).code == 0
    good = contents(out / "checkpoints" / "step-000002")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "lr_multiplier", lambda step, s: 1e33)
        done = train("--loop.save_every", save_every, "--resume", "true")
    assert done.code == 2
    assert "the loss is nan at step 4" in done.err.splitlines()[-1]
    assert contents(out / "checkpoints" / "step-000002") == good
    assert train("--resume", "true").code == 0  # with the old learning rate
    assert losses_of(out)[-1] < losses_of(out)[0]


@pytest.mark.parametrize("at", [4, STEPS])
def test_a_step_that_ruins_the_weights_is_not_saved(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Bug: the loss of a step is computed before its update, so a checkpoint, or the draft itself, is infinite."""
    out, step_of = tmp_path / "out", loop.train_step

    def ruined(training: Any, s: Any, step: int, *rest: Any) -> Any:
        result = step_of(training, s, step, *rest)
        if step + 1 == at:
            next(training.model.parameters()).data.view(-1)[0] = float("inf")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", ruined)
        done = train("--loop.save_every", 2)
    assert done.code == 2
    assert f"weights are NaN or infinite after step {at}" in done.err.splitlines()[-1]
    assert f"the last good checkpoint is {out}/checkpoints/step-00000{at - 2}" in done.err
    assert not (out / WEIGHTS).exists()
    assert train("--loop.save_every", 2).code == 0


def test_a_draft_with_nan_weights_is_refused(world: World, train: Callable, tmp_path: Path) -> None:
    """Bug: NaN is averaged away or logged as null, and the run goes on."""
    broken = tmp_path / "broken"
    shutil.copytree(world.draft, broken)
    weights = load_file(broken / WEIGHTS)
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, broken / WEIGHTS, metadata={"format": "pt"})
    done = train("--draft.init", broken)
    assert done.code == 2
    assert "hold NaN or infinity" in done.err.splitlines()[-1]
    assert not (tmp_path / "out" / WEIGHTS).exists()


def test_samples_longer_than_the_draft_are_said(
    world: World, target: Target, tmp_path: Path
) -> None:
    """Catches labels where the draft will never draft trained on without a word, and a warning about others."""
    small = worlds.save(
        tmp_path / "small",
        tiny_model("llama", vocab_size=target.runner.vocab_size, max_position_embeddings=16),
        target.tokenizer,
    )
    rows = [
        {"id": str(n), "source": "", "origin": "target", "input_ids": list(range(n)), "loss_spans": [[4, n]],
         "finish_reason": "length"}
        for n in (10, 16, 17, 30)
    ]  # fmt: skip
    settings = DistillConfig(draft=CausalSettings(init=str(small)))
    with pytest.warns(UserWarning, match="2 of 4 samples have labels beyond .* context of 16"):
        build_draft(settings, target, Mixture([rows], [1.0]))  # type: ignore[list-item]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_draft(settings, target, Mixture([rows[:2]], [1.0]))  # type: ignore[list-item]


def test_another_run_s_folder_is_refused_until_told(
    train: Callable, undisturbed: Path, tmp_path: Path
) -> None:
    """Bug: a changed learning rate goes on in, or deletes, a draft that took a day."""
    assert train("--loop.lr", 1e-4).code == 0
    before = contents(tmp_path / "out")
    error = train().error()
    assert "loop" in error
    assert "--resume" in error
    assert "--overwrite" in error
    assert contents(tmp_path / "out") == before
    assert train("--overwrite", "true").code == 0
    assert_same_run(tmp_path / "out", undisturbed)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--loop.lrr", 1], "did you mean 'loop.lr'"),
        (["--loop.steps", "many"], "loop.steps"),
        (
            ["--draft.layers", "[0]", "--draft.init_config", "{hidden_size: 8}"],
            "draft.init",
        ),  # both
    ],
)
def test_bad_input_is_one_line_and_makes_no_folder(
    train: Callable, tmp_path: Path, wrong: list, named: str
) -> None:
    """Bug: a typo is ignored, ends in a traceback, or leaves a claimed folder behind."""
    assert named in train(*wrong).error()
    assert not (tmp_path / "out").exists()


def test_never_measuring_is_never_measuring(train: Callable, tmp_path: Path) -> None:
    """Bug: loop.eval_every 0 still decodes at the end, which fails where the decoder cannot run the target."""
    assert train("--loop.eval_every", 0).code == 0
    assert metrics_of(tmp_path / "out", "accept/tau") == []
    assert facts_of(tmp_path / "out")["measured_in_training"] == {}


# ---- tracking ----


@pytest.mark.slow
def test_an_offline_run_writes_below_out_only(world: World, data: Path, tmp_path: Path) -> None:
    """Bug: W&B, transformers or accelerate leave files in the home, temporary or current folder."""
    folders = {name: tmp_path / name for name in ("home", "tmp", "cwd")}
    for folder in folders.values():
        folder.mkdir()
    out = tmp_path / "out"
    # an empty variable is none: without a login W&B goes offline by itself, and one line says so
    env = {"HOME": str(folders["home"]), "TMPDIR": str(folders["tmp"]), "WANDB_MODE": ""}
    done = worlds.run(COMMAND, *arguments(world, data, out), env=env, cwd=folders["cwd"]).ok()
    assert done.err.count("so the run is kept offline") == 1
    assert "W&B failed" not in done.err
    assert len(list((out / "wandb").glob("offline-run-*/run-*.wandb"))) == 1
    left = {name: sorted(map(str, folder.rglob("*"))) for name, folder in folders.items()}
    assert left == {name: [] for name in folders}
