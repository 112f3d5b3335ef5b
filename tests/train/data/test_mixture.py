"""Sets mixed by weight: shares kept exactly, every source an endless run of permutations, steps without memory."""

import dataclasses
import json
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.common.errors import UserError
from decode.common.settings import parse_settings, to_yaml
from decode.model.loading import Target, tokenizer_fingerprint
from tests import worlds
from tests.rows import sample_row
from tests.tiny import tiny_config, tiny_model, tiny_target
from tests.train.data.test_manifest import MANIFEST
from tests.worlds import byte_tokenizer
from train.data.batching import shuffled_index
from train.data.manifest import write_manifest
from train.data.mixture import Mixture, data_manifests, load, source_at
from train.data.sample_store import SampleRow, read_shards, write_shard
from train.settings.data import DataSpec, MixturePart

TARGET = tiny_target(tiny_model("llama"))


def rows(name: str, count: int) -> list[SampleRow]:
    return [sample_row([1, 2, 3, i], [[2, 4]], f"{name}{i}", name) for i in range(count)]


def written(folder: Path, name: str, count: int, tokenizer: str = "aa") -> str:
    write_shard(folder, rows(name, count), "00000")
    write_manifest(folder, dataclasses.replace(MANIFEST, tokenizer_hash=tokenizer))
    return str(folder)


@pytest.mark.parametrize(
    "weights", [[1], [3, 1], [1, 1, 1], [0.1, 0.7, 0.2], [5, 1, 2.5, 1e-3], [1 / 3, 2]]
)
def test_shares_are_kept_after_any_number_of_places(weights: list[float]) -> None:
    """Bug: a source gets its share by chance only, in runs, or is left out by rounding; or rows of it are skipped."""
    shares = [Fraction(str(weight)) for weight in weights]
    taken = Counter(dict.fromkeys(range(len(weights)), 0))
    for place in range(3000):
        source, number = source_at(shares, place)
        assert number == taken[source]  # one after the other
        taken[source] += 1
        for i, weight in enumerate(weights):
            assert abs(taken[i] - (place + 1) * weight / sum(weights)) < len(weights)


def test_one_source_is_what_it_was() -> None:
    """Bug: runs with one folder meet other batches than before there were mixtures."""
    mixture = Mixture([rows("a", 7)], [1.0])
    for step in range(6):
        ids = [row["id"] for row in mixture.global_batch(3, 5, step)]
        assert ids == [f"a{shuffled_index(7, 5, place)}" for place in range(3 * step, 3 * step + 3)]


def test_each_source_is_an_endless_run_of_fresh_permutations() -> None:
    """Bug: sources share one permutation, a small one is never shuffled again, or an epoch leaves rows out."""
    mixture = Mixture([rows("a", 6), rows("b", 6), rows("c", 3)], [2, 1, 1])
    stream = [row for step in range(12) for row in mixture.global_batch(8, 0, step)]
    orders = {}
    for name, size, times in (("a", 6, 8), ("b", 6, 4), ("c", 3, 8)):
        own = [row["input_ids"][-1] for row in stream if row["source"] == name]
        epochs = [own[i : i + size] for i in range(0, len(own), size)]
        assert len(epochs) == times
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) > 1
        orders[name] = epochs
    assert orders["a"][:4] != orders["b"]
    small = Mixture([rows("a", 2)], [1.0]).global_batch(6, 0, 1)  # a batch larger than the set
    assert sorted(row["id"] for row in small) == ["a0"] * 3 + ["a1"] * 3


def test_steps_depend_on_nothing_but_the_arguments() -> None:
    """Bug: a resumed run meets other rows than the run that was never stopped."""

    def made() -> Mixture:
        return Mixture([rows("a", 5), rows("b", 3)], [3, 1])

    mixture = made()
    torch.manual_seed(99)
    straight = [mixture.global_batch(4, 1, step) for step in range(9)]
    assert [made().global_batch(4, 1, step) for step in (8, 3)] == [straight[8], straight[3]]
    assert [made().global_batch(4, 2, step) for step in range(9)] != straight


def test_two_answers_to_one_prompt_stay_two(tmp_path: Path) -> None:
    """Bug: stored features of one set are used for the row of the same id in another."""
    paths = [written(tmp_path / name, "same", 3) for name in ("one", "two")]
    mixture, dropped = load([MixturePart(path) for path in paths], 99)
    ids = [row["id"] for row in mixture]
    assert ids == [f"{part}/same{i}" for part in (0, 1) for i in range(3)]
    assert [row["id"] for row in mixture.global_batch(6, 0, 0)] != ids
    assert dropped == 0
    assert [row["id"] for row in mixture[2:4]] == [mixture[2]["id"], mixture[3]["id"]]
    assert [row["id"] for row in load(paths[0], 99)[0]] == ["same0", "same1", "same2"]


def test_a_limit_takes_some_rows_of_a_set(tmp_path: Path) -> None:
    """Bug: the first rows instead of random ones, others at every start, or fewer rows than before in a larger part."""
    path, other = written(tmp_path / "one", "a", 40), written(tmp_path / "two", "b", 5)

    def ids(limit: int, seed: int) -> list[str]:
        return [row["id"] for row in load([MixturePart(path, limit=limit)], 99, seed=seed)[0]]

    whole = [f"a{i}" for i in range(40)]
    few, more = ids(8, 0), ids(20, 0)
    assert (len(few), len(more)) == (8, 20)
    assert set(few) < set(more) < set(whole)
    assert few == ids(8, 0) != ids(8, 1)
    assert few != whole[:8]
    assert ids(0, 0) == ids(40, 0) == ids(99, 0) == whole
    mixed, _ = load([MixturePart(path, limit=8), MixturePart(other, 2)], 99)
    assert [row["id"] for row in mixed] == [f"0/{name}" for name in few] + [
        f"1/b{i}" for i in range(5)
    ]
    taken = {row["id"] for step in range(8) for row in mixed.global_batch(3, 0, step)}
    assert taken == {row["id"] for row in mixed}
    assert [row["id"] for row in mixed.whole] == [f"0/{x}" for x in whole] + [
        f"1/b{i}" for i in range(5)
    ]


def test_whole_rows_are_labels_only_where_asked_for(tmp_path: Path) -> None:
    """Bug: labels go beyond a row that was cut, or the rows on disk get other labels for the next run."""
    path = written(tmp_path / "set", "a", 2)
    whole, dropped = load(path, 3, supervise="all")
    assert [(list(row["input_ids"]), row["loss_spans"]) for row in whole] == [
        ([1, 2, 3], [[0, 3]])
    ] * 2
    assert dropped == 0
    assert [row["loss_spans"] for row in load(path, 99)[0]] == [[[2, 4]]] * 2


def test_every_set_must_have_the_target_s_tokenizer(tmp_path: Path) -> None:
    """Bug: only the first folder is looked at, and a second one teaches other tokens."""
    good = written(tmp_path / "good", "a", 2)
    bad = written(tmp_path / "bad", "b", 2, tokenizer="bb")
    with pytest.raises(UserError, match=rf"samples in {bad} .*tokenizer bb.* has aa"):
        load(
            [MixturePart(good), MixturePart(bad)], 99, dataclasses.replace(TARGET, fingerprint="aa")
        )


def tokenizer_with(folder: Path, *tokens: str) -> Any:
    """The byte tokenizer with tokens behind its own, saved as that of a model."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(tokens))
    tokenizer.save_pretrained(folder)
    tiny_config("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    return tokenizer


def sampled_by(folder: Path, then: Any, now: Any, rows: list[SampleRow]) -> Target:
    """Saves a set of a model in `then` with its tokenizer, and returns a target with that of `now`."""
    write_shard(folder / "set", rows, "00000")
    made = dataclasses.replace(
        MANIFEST, target=str(folder / "then"), revision=None,
        tokenizer_hash=tokenizer_fingerprint(then),
    )  # fmt: skip
    write_manifest(folder / "set", made)
    return dataclasses.replace(TARGET, tokenizer=now, fingerprint=tokenizer_fingerprint(now))


BASE = len(byte_tokenizer())
# the set's tokens and the target's behind the common ones, an id in the set's last row, what is said of it
PAIRS: dict[str, tuple[tuple[str, ...], tuple[str, ...], int, str]] = {
    "the target has two more": ((), ("<a>", "<b>"), 7, ""),
    "the target has one more": (("<a>",), ("<a>", "<b>"), BASE, ""),
    "the set's target has two more": (("<a>", "<b>"), (), BASE - 1, ""),
    "a row has one that the target lacks": (
        ("<a>", "<b>"), ("<a>",), BASE + 1, f"id {BASE + 1} is '<b>' for the samples and no token for the target",
    ),
    "one id is two tokens": (
        ("<b>",), ("<a>", "<b>"), 7, f"id {BASE} is '<b>' for the samples and '<a>' for the target",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PAIRS)
def test_sets_of_vocabularies_that_extend_each_other(case: str, tmp_path: Path) -> None:
    """Bug: a set is refused for tokens that were added to the target's tokenizer since, or one is trained on whose ids
    mean other tokens, or have no row in the embedding. Before, hashes alone were compared: all five were refused."""
    own, wanted, token, said = PAIRS[case]
    then = tokenizer_with(tmp_path / "then", *own)
    now = tokenizer_with(tmp_path / "now", *wanted)
    last = sample_row([1, 2, 3, token], [[2, 4]], "y0")
    target = sampled_by(tmp_path, then, now, [*rows("x", 3), last])
    doctor = ("train/doctor.py", "--data", tmp_path / "set", "--target", tmp_path / "now")
    if said:
        with pytest.raises(
            UserError, match=f"samples in {tmp_path}/set were made with .*{re.escape(said)}"
        ):
            load(str(tmp_path / "set"), 99, target)
        assert said in worlds.call(*doctor).error()
    else:
        found, dropped = load(str(tmp_path / "set"), 99, target)
        assert [list(row["input_ids"]) for row in found][-1] == [1, 2, 3, token]
        assert dropped == 0
        done = worlds.call(*doctor).ok()
        assert json.loads(done.out.splitlines()[-1])["parts"]["Sampled set"]["rows"] == 4


def test_a_tokenizer_that_is_gone_is_compared_by_its_hash(tmp_path: Path) -> None:
    """Bug: the tokenizer that now stands where the set's stood is taken for it."""
    then = tokenizer_with(tmp_path / "then")
    now = tokenizer_with(tmp_path / "then", "<a>")
    target = sampled_by(tmp_path, then, now, rows("x", 3))
    with pytest.raises(UserError, match=f"has {target.fingerprint}: sample this target"):
        load(str(tmp_path / "set"), 99, target)


def test_how_the_data_was_made_is_told(tmp_path: Path) -> None:
    """Bug: a draft from two sets names one of them, or another shape for a single one than before."""
    paths = [written(tmp_path / name, name, 2) for name in ("one", "two")]
    own = json.loads((tmp_path / "one" / "manifest.json").read_text())
    del own["shards"]  # hundreds of lines in a large set
    assert data_manifests(paths[0]) == own
    several = data_manifests([MixturePart(paths[0], 3), MixturePart(paths[1])])
    assert [(part["path"], part["weight"]) for part in several] == [(paths[0], 3), (paths[1], 1.0)]
    assert several[0]["manifest"] == own


@dataclasses.dataclass
class Settings:
    data: DataSpec = "outputs/samples"


def test_one_folder_or_several_in_settings(tmp_path: Path) -> None:
    """Bug: the old spelling breaks, run.yaml cannot be read back, or a list merges with that of the config."""
    assert parse_settings(Settings, "", []).data == "outputs/samples"
    assert parse_settings(Settings, "", ["--data", "some/where"]).data == "some/where"
    wanted = [MixturePart("a", 3), MixturePart("b", 1)]
    said = "[{path: a, weight: 3}, {path: b}]"
    assert parse_settings(Settings, "", ["--data", said]).data == wanted
    config = tmp_path / "run.yaml"
    config.write_text(to_yaml(Settings(data=wanted)))
    assert parse_settings(Settings, "", ["--config", str(config)]).data == wanted
    over = ["--config", str(config), "--data", "[{path: c}, {path: d}]"]
    assert parse_settings(Settings, "", over).data == [MixturePart("c"), MixturePart("d")]
    assert parse_settings(Settings, "", ["--config", str(config), "--data", "e"]).data == "e"
    with pytest.raises(UserError, match=r"no setting data\[0\].wait"):
        parse_settings(Settings, "", ["--data", "[{path: a, wait: 3}]"])


def test_the_command_trains_on_a_mixture(tmp_path: Path) -> None:
    """Bug: the command reads the first folder only, or goes on after a kill with other rows than it would have had."""
    world = worlds.build(tmp_path / "world", prompts=12)
    samples, texts, out = tmp_path / "samples", tmp_path / "texts", tmp_path / "out"
    whole = tmp_path / "texts.jsonl"
    whole.write_text(world.prompts.read_text().replace('"prompt"', '"text"'))
    for path, where, origin in ((world.prompts, samples, "target"), (whole, texts, "text")):
        sources = json.dumps([{"kind": "file", "path": str(path)}])
        done = worlds.call(
            "train/sample.py", "--target", world.target, "--sources", sources,
            "--max_new_tokens", 8, "--out", where, "--origin", origin,
        ).ok()  # fmt: skip
    data = json.dumps([{"path": str(samples), "weight": 3}, {"path": str(texts)}])
    command = [
        "--target", world.target, "--draft.init", world.draft, "--data", data, "--out", out,
        "--loop.steps", 4, "--loop.batch_size", 8, "--loop.warmup", 1, "--loop.save_every", 2,
        "--loop.log_every", 1, "--loop.eval_every", 0,
    ]  # fmt: skip
    worlds.call("train/distill.py", *command).ok()
    whole = (out / "model.safetensors").read_bytes()
    facts = json.loads((out / "draftsmith.json").read_text())
    assert [(part["path"], part["weight"]) for part in facts["data_manifest"]] == [
        (str(samples), 3.0),
        (str(texts), 1.0),
    ]
    assert facts["samples"] == len(read_shards(samples)) + len(read_shards(texts))
    (out / "checkpoints" / "latest").write_text("step-000002\n")  # as if killed after step 2
    done = worlds.call("train/distill.py", *command)
    assert "from step 2" in done.err
    assert (out / "model.safetensors").read_bytes() == whole
    worlds.call("train/distill.py", *command, "--data", samples, "--overwrite", "true").ok()
    assert (out / "model.safetensors").read_bytes() != whole
