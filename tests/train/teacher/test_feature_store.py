"""The target's states and laws from disk: what the live target says, whole after a kill, refused when of others."""

import dataclasses
import io
import json
import multiprocessing
import re
import shutil
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from decode.common.errors import UserError
from decode.common.progress import format_bytes
from decode.common.target_record import ModelFingerprint
from decode.model.hidden_states import HiddenStateSpec
from decode.model.loading import Target, load_target
from tests import worlds
from tests.params import rotated
from tests.tiny import VOCAB, tiny_model, tiny_prompts, tiny_target
from tests.worlds import Done, contents
from train.data import batching, sample_store
from train.data.batching import Batch
from train.data.manifest import Manifest, write_manifest
from train.data.sample_store import SampleRow
from train.families.base import FamilyContext, TrainableDraft
from train.families.builders import build_trainable
from train.families.settings.base import FamilySettings
from train.families.settings.causal import CausalSettings
from train.families.settings.eagle import Eagle1Settings, Eagle3Settings
from train.families.settings.heads import MedusaSettings
from train.teacher import feature_codec, feature_extraction, feature_store
from train.teacher.cached import CachedTeacher, FeatureFolder
from train.teacher.feature_store import FeatureStore
from train.teacher.live import LiveTeacher, TeacherOutput
from train.trainer.settings import DistillConfig

TAPS = HiddenStateSpec((0, 1, 2))
FAMILY: dict[str, FamilySettings] = {
    "causal": CausalSettings(layers=[0, 1]),
    "medusa": MedusaSettings(heads=3),
    "eagle1": Eagle1Settings(),
    "eagle3": Eagle3Settings(steps=3, vocab=60, taps=list(TAPS.layers)),
}
Laws = namedtuple("Laws", "live stored")


def rows_of(*lengths: int, vocab: int = VOCAB) -> list[SampleRow]:
    """Samples of these lengths; the target wrote what follows the first third, a token in it left out."""
    return [
        SampleRow(
            id=f"s{i}", source="test", origin="target", input_ids=ids,
            loss_spans=[[len(ids) // 3, len(ids) // 2], [len(ids) // 2 + 1, len(ids)]],
            finish_reason="length",
        )
        for i, ids in enumerate(tiny_prompts(*lengths, vocab=vocab))
    ]  # fmt: skip


ROWS = rows_of(*(5 + 7 * i % 40 for i in range(40)))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture
def target(model: Any) -> Target:
    return tiny_target(model)


def folder_of(path: Path, top: int = 64, max_length: int = 512) -> FeatureFolder:
    return FeatureFolder(path, top, max_length)


def stored(
    path: Path, target: Target, taps: HiddenStateSpec | None = TAPS, top: int = 64,
    rows: Sequence[SampleRow] = ROWS,
) -> CachedTeacher:  # fmt: skip
    """Filled features."""
    made = CachedTeacher(target, taps, rows, folder_of(path, top))
    made.fill_store(Console(quiet=True))
    return made


def some(seed: int, count: int = 6, rows: Sequence[SampleRow] = ROWS) -> Batch:
    """A batch of samples in no order."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]
    return batching.collate([rows[int(i)] for i in order], 0)


def inside(batch: Batch, rows: Sequence[SampleRow] = ROWS) -> Tensor:
    """[B, T] bool, False at padding."""
    length = {row["id"]: len(row["input_ids"]) for row in rows}
    ends = torch.tensor([length[name] for name in batch.ids])
    return torch.arange(batch.input_ids.shape[1]) < ends[:, None]


# ---- what comes back is what the target said ----


@pytest.mark.parametrize(
    ("arch", "taps"),
    rotated(
        ["llama", "gemma3_text", "gpt2"], [TAPS, HiddenStateSpec((2,)), HiddenStateSpec(final=True)]
    ),
)
def test_states_are_those_of_the_live_target(
    tmp_path: Path, arch: str, taps: HiddenStateSpec
) -> None:
    """Bug: rows of another sample, position or tap; a scale that is shared by taps; overflow to NaN at the largest.
    Batches mix shards and are padded to other lengths than in the pass."""
    target = tiny_target(tiny_model(arch))
    cached, live = stored(tmp_path, target, taps), LiveTeacher(target, taps)
    assert len(cached.cache.shard_members) >= 10
    for seed in range(4):
        batch = some(seed)
        assert (
            len({int(cached.cache.shard[cached.cache.sample_index[name]]) for name in batch.ids})
            > 2
        )
        here, there = cached.get_output(batch).features, live.get_output(batch).features
        assert here.shape == there.shape
        assert bool((here[~inside(batch)] == 0).all())
        x = there[inside(batch)].unflatten(-1, (-1, target.runner.config.hidden_size))
        least = x.abs().amax(-1, keepdim=True) / 448 * 2**-10
        wrong = (here[inside(batch)].view_as(x) - x).abs()
        assert bool((wrong <= x.abs() * 2**-4 * 1.01 + least * 1.01 + 1e-5).all())


def test_every_byte_of_fp8_is_read_as_torch_reads_it() -> None:
    """Bug: the quick conversion has a wrong sign, exponent or subnormal numbers."""
    bits = torch.arange(256, dtype=torch.uint8)
    bits = bits[(bits & 0x7F) != 0x7F].view(127, 1, 2)  # without NaN, which is never written
    values = bits.view(torch.float8_e4m3fn)
    scale = torch.full((127, 1), 0.5, dtype=torch.bfloat16)
    assert torch.equal(feature_codec.unpack_hidden_states(bits, scale), values.float() / 2)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e30])
def test_states_of_any_size_survive(size: float) -> None:
    """Bug: all zeros become NaN; small or large states are lost to the range of fp8 or of the scale."""
    states = size * torch.randn(50, 3, 64)
    found = feature_codec.unpack_hidden_states(**feature_codec.pack_hidden_states(states))
    torch.testing.assert_close(found, states, rtol=0.1, atol=size * 2**-12)


def test_a_broken_target_is_not_hidden() -> None:
    """Bug: NaN or infinite states are clamped to something that trains."""
    for value in (float("nan"), float("inf")):
        states = torch.ones(1, 1, 8)
        states[0, 0, 3] = value
        found = feature_codec.pack_hidden_states(states)
        assert not bool(torch.isfinite(feature_codec.unpack_hidden_states(**found)).all())


def laws(tmp_path: Path, target: Target, top: int) -> Laws:
    """p [N, V] of the live target and from disk, at the supervised rows of a few batches."""
    cached, live = stored(tmp_path, target, None, top), LiveTeacher(target, HiddenStateSpec())
    pairs = []
    for seed in range(3):
        batch = some(seed)
        mask = batch.loss_mask
        pairs.append(
            [
                source.head(source.get_output(batch).head_inputs[mask]).softmax(-1)
                for source in (live, cached)
            ]
        )
    return Laws(*(torch.cat(p) for p in zip(*pairs, strict=True)))


def test_with_all_tokens_kept_the_law_is_that_of_the_live_target(
    tmp_path: Path, target: Target
) -> None:
    """Bug: ids lose precision on their way; rows of another position; the rest is spread over tokens that are kept."""
    live, cached = laws(tmp_path, target, VOCAB)
    torch.testing.assert_close(cached, live, rtol=1.1e-3, atol=1e-7)


def test_what_is_not_kept_shares_what_is_left(tmp_path: Path, target: Target) -> None:
    """Bug: kept tokens are renormalised, and teach a draft that the others are impossible; or -inf gives NaN."""
    divergences = []
    for top in (1, 8, 64):
        live, cached = laws(tmp_path, target, top)
        kept = live.topk(top)
        torch.testing.assert_close(
            cached.gather(-1, kept.indices), kept.values, rtol=1.1e-3, atol=1e-7
        )
        others = cached.scatter(-1, kept.indices, -1.0)
        others = others[others >= 0].view(len(live), VOCAB - top)
        assert float(others.min()) > 0
        torch.testing.assert_close(others, others[:, :1].expand_as(others))
        divergences.append(float((live * (live.log() - cached.log())).sum(-1).mean()))
    assert divergences == sorted(divergences, reverse=True)
    assert divergences[-1] < 0.01


def test_without_a_top_laws_come_from_final_states(tmp_path: Path, target: Target) -> None:
    """Bug: the head reads tapped states, or a state of fp8 gives another law; or states are stored twice."""
    live, cached = laws(tmp_path / "law", target, 0)
    assert float((live * (live.log() - cached.log())).sum(-1).mean()) < 1e-2
    for taps, kinds in (TAPS, {"taps-0-1-2", "final"}), (HiddenStateSpec(final=True), {"final"}):
        made = stored(tmp_path / "both", target, taps, 0)
        assert {kind.name for kind in made.cache.kinds} == kinds
        batch = some(0)
        look, mask = made.get_output(batch), batch.loss_mask
        again = made.head(look.head_inputs[mask]).softmax(-1)
        torch.testing.assert_close(again, cached[: len(again)])


def test_a_law_sums_to_one_and_has_no_impossible_token() -> None:
    """Bug: probabilities rounded to fp16 sum to more than 1, so that what is left is negative, or 0 and its log -inf.
    The likeliest token has 0.9997, which fp16 holds as 0.99951: a rest that is not stored would be twice what it is."""
    logits = torch.zeros(3, 1000)
    logits[0, 5], logits[1, 7], logits[2, :30] = 100.0, 15.0, 3.0
    found = feature_codec.pack_distribution(logits, 20)
    payload = torch.cat([found["ids"].float(), found["probabilities"].float()], -1)
    law = feature_codec.unpack_log_probs(payload, 20, 1000)
    assert bool(torch.isfinite(law).all())
    torch.testing.assert_close(law.exp().sum(-1), torch.ones(3))
    p = logits.softmax(-1)
    rest = 1 - p.topk(20).values.sum(-1)
    found = 1 - law.double().exp().topk(20).values.sum(-1)
    assert found[1].item() == pytest.approx(rest[1].item(), rel=2e-3)


def test_ids_beyond_16_bits_survive() -> None:
    """Bug: a vocabulary of 150,000 is stored in 16 bits, and ids wrap around."""
    logits = torch.zeros(2, 150_000)
    logits[0, 149_999], logits[1, 2**16] = 30.0, 30.0
    found = feature_codec.pack_distribution(logits, 4)
    assert found["ids"][:, 0].tolist() == [149_999, 2**16]
    payload = torch.cat([found["ids"].float(), found["probabilities"].float()], -1)
    assert feature_codec.unpack_log_probs(payload, 4, 150_000).argmax(-1).tolist() == [
        149_999,
        2**16,
    ]


def trainee_of(family: str, target: Target, where: FeatureFolder | None) -> TrainableDraft:
    torch.manual_seed(0)
    settings = DistillConfig(draft=FAMILY[family])
    return build_trainable(settings.draft, FamilyContext(settings, target, ROWS, "cpu", where))


@pytest.mark.parametrize("family", FAMILY)
def test_losses_are_those_of_the_live_target(tmp_path: Path, model: Any, family: str) -> None:
    """Bug: a trainer takes features for the teacher, or the other way round, or a stored law of a wrong row. With live
    features and all tokens kept the loss is equal; with stored features nearly so."""
    live = trainee_of(family, tiny_target(model), None)
    cached = trainee_of(family, tiny_target(model), folder_of(tmp_path, VOCAB))
    cached.model.load_state_dict(live.model.state_dict())
    assert isinstance(cached.teacher, CachedTeacher)
    cached.teacher.fill_store(Console(quiet=True))
    batch = some(0)
    with torch.no_grad():
        wanted = live.loss(live.model, batch)
        found = cached.loss(cached.model, batch)
        if family != "causal":
            look = TeacherOutput(
                live.teacher.get_output(batch).features,
                cached.teacher.get_output(batch).head_inputs,
            )
            exact = cached.model(batch, look)
        else:
            exact = found
    for name, value in wanted.items():
        assert exact[name].item() == pytest.approx(value.item(), rel=1e-3, abs=1e-3), name
    assert found["loss"].item() == pytest.approx(wanted["loss"].item(), rel=0.03)


# ---- on disk ----


@pytest.mark.parametrize("length", [40, 90])
def test_bytes_a_token_are_less_than_half_of_bf16(tmp_path: Path, length: int) -> None:
    """Bug: states as bf16, laws at prompt positions, or a scale for each value: a disk that is full."""
    target = tiny_target(tiny_model("llama", hidden_size=256, max_position_embeddings=128))
    rows = rows_of(*[length] * 24)
    made = stored(tmp_path, target, TAPS, 64, rows)
    files = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    tokens = sum(len(row["input_ids"]) for row in rows)
    assert files / tokens <= 8 * 256 / 2
    headers = 32 * 600  # 16 shards of 2 kinds
    assert (
        made.cache.bytes_per_token() * tokens
        <= files
        <= made.cache.bytes_per_token() * tokens + headers
    )


def test_killed_and_started_again_the_files_are_the_same(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: half a shard counts as made; a resumed pass batches samples otherwise; what is there is made again."""
    stored(tmp_path / "whole", target)
    replace, left = Path.replace, [9]

    def killed(self: Path, to: Path) -> Path:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return replace(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            stored(tmp_path / "killed", target)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("killed/*/shards/*s")}
    assert 0 < len(before) < len(list(tmp_path.glob("whole/*/shards/*s")))
    stored(tmp_path / "killed", target)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def hold(folder: Path, held: Any) -> None:
    kind = feature_codec.hidden_state_schema(HiddenStateSpec((0, 1, 2)), 32)
    with FeatureStore(folder, [kind], ROWS, {}).lock():
        held.set()
        time.sleep(60)


@pytest.mark.slow
def test_two_commands_do_not_fill_one_folder(tmp_path: Path, target: Target) -> None:
    """Bug: two commands make the same shards at once, each in half the time it should take; or what a killed one
    leaves behind locks the folder for ever."""
    folder, forks = tmp_path / "f", multiprocessing.get_context("fork")
    held = forks.Event()
    other = forks.Process(target=hold, args=(folder, held), daemon=True)
    other.start()
    assert held.wait(60)
    shutil.rmtree(folder / "taps-0-1-2")  # what it claims the folder for is another matter
    with pytest.raises(UserError, match="another run is using the features in"):
        stored(folder, target)
    assert list(folder.glob("*/shards/*")) == []
    other.kill()
    other.join()
    stored(folder, target)
    filled = contents(folder)
    with CachedTeacher(target, TAPS, ROWS, folder_of(folder)).cache.lock():  # nothing is missing
        stored(folder, target)
    assert contents(folder) == filled


def test_two_processes_make_the_files_of_one(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: shards depend on who makes them, are made twice, or are checked before all are there."""
    stored(tmp_path / "one", tiny_target(model))
    write, wrote = FeatureStore.write, []

    def noted(
        self: FeatureStore, kind: feature_codec.FeatureSchema, shard: int,
        tensors: dict[str, Tensor],
    ) -> None:  # fmt: skip
        wrote.append((threading.current_thread().name, kind.name, shard))
        write(self, kind, shard, tensors)

    monkeypatch.setattr(FeatureStore, "write", noted)
    barrier, errors = threading.Barrier(2, timeout=60), []

    def work(rank: int, target: Target) -> None:
        try:
            made = CachedTeacher(target, TAPS, ROWS, folder_of(tmp_path / "two"))
            made.fill_store(Console(quiet=True), rank, 2, lambda: barrier.wait() and None)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [
        threading.Thread(target=work, args=(rank, tiny_target(model)), name=str(rank))
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert len(wrote) == len({job[1:] for job in wrote})
    by_rank = [sum(name == rank for name, *_ in wrote) for rank in ("0", "1")]
    assert max(by_rank) - min(by_rank) <= 2


def changed(rows: Sequence[SampleRow], at: int, **values: Any) -> list[SampleRow]:
    fresh = list(rows)
    fresh[at] = {**fresh[at], **values}  # type: ignore[typeddict-item]
    return fresh


def known_as(target: Target, weights: str, dtype: str, **fields: Any) -> Target:
    """The target as if its files had this fingerprint."""
    fresh = dataclasses.replace(target, **fields)
    vars(fresh)["identity"] = ModelFingerprint(weights, dtype, fresh.revision)
    return fresh


OTHERS: dict[str, Callable[[Target], tuple[Target, list[SampleRow], int]]] = {
    "weights": lambda t: (known_as(t, "bb", "float32"), ROWS, 512),
    "dtype": lambda t: (known_as(t, "aa", "bfloat16"), ROWS, 512),
    "tokenizer": lambda t: (dataclasses.replace(t, fingerprint="other"), ROWS, 512),
    "max_length": lambda t: (t, ROWS, 64),
    "samples": lambda t: (t, changed(ROWS, 3, input_ids=[1] * len(ROWS[3]["input_ids"])), 512),
    "samples ids": lambda t: (t, changed(ROWS, 3, id="new"), 512),
    "samples spans": lambda t: (t, changed(ROWS, 3, loss_spans=[[1, 3]]), 512),
    "samples order": lambda t: (t, ROWS[::-1], 512),
    "count": lambda t: (t, ROWS[:-1], 512),
}


@pytest.mark.parametrize("what", OTHERS)
def test_features_of_something_else_are_refused(tmp_path: Path, target: Target, what: str) -> None:
    """Bug: states of another target, tokenizer, data set or cut train a draft, silently and to nothing."""
    target = known_as(target, "aa", "float32")
    stored(tmp_path, target, None)
    before = contents(tmp_path)
    other, rows, max_length = OTHERS[what](target)
    with pytest.raises(UserError, match=what.split()[0]) as refusal:
        CachedTeacher(other, None, rows, folder_of(tmp_path, max_length=max_length))
    assert str(tmp_path / "top-64") in str(refusal.value)
    assert contents(tmp_path) == before


def test_features_are_of_weights_and_not_of_a_name(tmp_path: Path, target: Target) -> None:
    """Bug: a copied folder, or another commit of the same weights, has everything computed again."""
    made = stored(tmp_path, known_as(target, "aa", "float32"), None)
    before = contents(tmp_path)
    for fields in ({"name": "copy"}, {"revision": "abc"}):
        again = CachedTeacher(
            known_as(target, "aa", "float32", **fields), None, ROWS, folder_of(tmp_path)
        )
        again.cache.check()
        assert again.cache.key == made.cache.key
    assert contents(tmp_path) == before


def test_shards_without_a_manifest_are_refused(tmp_path: Path, target: Target) -> None:
    """Bug: nobody knows whose states these are, and they are used."""
    stored(tmp_path, target, None)
    (tmp_path / "top-64" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"manifest\.json"):
        CachedTeacher(target, None, ROWS, folder_of(tmp_path))


@pytest.mark.parametrize(
    ("damage", "kind"),
    rotated(["byte", "sum", "short", "header", "other"], ["taps-0-1-2", "top-64"]),
)
def test_a_damaged_shard_is_made_again(
    tmp_path: Path, target: Target, kind: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: altered states are trained on, or the run ends although the target could make them again."""
    made = stored(tmp_path, target)
    batch = batching.collate([ROWS[int(i)] for i in made.cache.shard_members[4]], 0)
    expected, undisturbed = made.get_output(batch), contents(tmp_path)
    path = tmp_path / kind / "shards" / "000004.safetensors"
    if damage == "short":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "other":
        shutil.copy(tmp_path / kind / "shards" / "000005.safetensors", path)
    else:
        offset = int.from_bytes(path.read_bytes()[:8], "little") + 8
        worlds.flip_byte(path, {"byte": -1, "sum": offset + 1, "header": 12}[damage])
    again = CachedTeacher(target, TAPS, ROWS, folder_of(tmp_path))
    again.fill_store(Console(quiet=True))
    found = again.get_output(batch)
    assert torch.equal(found.features, expected.features)
    assert torch.equal(found.head_inputs, expected.head_inputs)
    assert contents(tmp_path) == undisturbed
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert said == [f"warning: features {path} are damaged and made again"]


def test_damage_of_a_running_training_is_mended_once(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: each of several processes that read the shard makes it again, over the files that others have open."""
    first, second = (stored(tmp_path, target) for _ in range(2))
    undisturbed = contents(tmp_path)
    members = [ROWS[int(i)] for i in first.cache.shard_members[4]]
    worlds.flip_byte(tmp_path / "taps-0-1-2" / "shards" / "000004.safetensors", -1)
    batch = batching.collate(members[-1:], 0)
    outputs = [teacher.get_output(batch).features for teacher in (first, second)]
    assert torch.equal(*outputs)
    assert contents(tmp_path) == undisturbed
    assert capsys.readouterr().err.count("made again") == 1


def test_a_damaged_manifest_says_what_to_delete(tmp_path: Path, target: Target) -> None:
    """Bug: the advice is to delete the manifest, after which nothing can be done."""
    stored(tmp_path, target, None)
    (tmp_path / "top-64" / "manifest.json").write_bytes(b"\0" * 30)
    with pytest.raises(UserError, match="delete this folder"):
        CachedTeacher(target, None, ROWS, folder_of(tmp_path))


def test_reading_a_sample_does_not_read_its_shard(tmp_path: Path) -> None:
    """Bug: a shard is loaded to read a row of it, and a set larger than memory ends the run. The shard has 128 MB; a
    sample of it 128 kB."""
    rows = rows_of(*[64] * 1024)
    kind = feature_codec.hidden_state_schema(TAPS, 683)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_store, "SHARD_TOKENS", 2**30)
        patch.setattr(feature_store, "TARGET_SHARD_COUNT", 1)
        cache = FeatureStore(tmp_path, [kind], rows, {})
    assert len(cache.shard_members) == 1
    states = torch.zeros(2**16, 3, 683, dtype=torch.uint8).view(torch.float8_e4m3fn)
    cache.write(kind, 0, {"states": states, "scale": torch.ones(2**16, 3, dtype=torch.bfloat16)})
    assert cache.path(kind, 0).stat().st_size > 128e6
    cache.check()
    before = resident()
    for sample in (3, 500, 1001):
        assert cache.read(kind, sample)["states"].shape == (64, 3, 683)
    assert resident() - before < 8e6


def resident() -> int:
    """Bytes of this process in memory, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_disk_without_room_is_refused_before_the_pass(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the disk is full after a day; or only room for what is missing is not enough."""
    made = CachedTeacher(target, TAPS, ROWS, folder_of(tmp_path / "new"))
    size = sum(map(made.cache.size, made.cache.kinds))
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(feature_extraction.shutil, "disk_usage", lambda path: usage(size - 1))
    with pytest.raises(UserError, match="features_top"):
        made.fill_store(Console(quiet=True))
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(feature_extraction.shutil, "disk_usage", lambda path: usage(size))
    made.fill_store(Console(quiet=True))
    monkeypatch.setattr(feature_extraction.shutil, "disk_usage", lambda path: usage(0))
    stored(tmp_path / "new", target)


def test_it_says_what_it_will_take(tmp_path: Path, target: Target) -> None:
    """Bug: nobody is told the size before hours of writing; or every process says it."""
    text = io.StringIO()
    made = CachedTeacher(target, TAPS, ROWS, folder_of(tmp_path))
    made.fill_store(Console(file=text, width=300))
    said = text.getvalue()
    assert format_bytes(sum(map(made.cache.size, made.cache.kinds))) in said
    assert f"{made.cache.bytes_per_token():,.0f} bytes a token" in said
    assert f"8 H = {8 * 32}" in said
    made.fill_store(Console(file=text, width=300))
    assert text.getvalue() == said  # nothing to do, nothing to say


def test_samples_of_one_length_lie_together_and_all_lie_somewhere() -> None:
    """Bug: a sample is in no shard or in two, or a pass is mostly padding."""
    tokens = torch.randint(1, 400, (1000,), generator=torch.Generator().manual_seed(0)).numpy()
    plan = feature_store.assign_shards(tokens)
    assert sorted(int(i) for shard in plan for i in shard) == list(range(1000))
    assert 15 <= len(plan) <= 17
    assert [int(tokens[i]) for shard in plan for i in shard] == sorted(tokens.tolist())
    assert len(feature_store.assign_shards(tokens[:1])) == 1


# ---- the real command ----


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 268 tokens, a small LM, and samples."""
    home = tmp_path_factory.mktemp("features")
    world = worlds.build(home / "world", 1)
    target = load_target(str(world.target), "cpu")
    rows = rows_of(*(20 + 5 * i % 31 for i in range(24)), vocab=target.runner.vocab_size)
    sample_store.write_shard(home / "samples", rows, "all")
    sampling: dict[str, Any] = {}
    manifest = Manifest("t", None, target.fingerprint, None, sampling, 0, {}, None, {})
    write_manifest(home / "samples", manifest)
    return home


COMMANDS: dict[str, list[object]] = {
    "causal": ["--draft.family", "causal"],
    "eagle3": ["--draft.family", "eagle3", "--draft.taps", "[0, 1]", "--draft.vocab", 100],
    "medusa": ["--draft.family", "medusa", "--draft.heads", 2],
    "eagle1": ["--draft.family", "eagle1"],
}
ADDS = {"causal": {"top-268"}, "eagle3": {"taps-0-1"}, "medusa": {"final"}, "eagle1": set()}


def distill(place: Path, out: str, family: str, *more: object) -> Done:
    init = ["--draft.init", place / "world" / "draft"] if family == "causal" else []
    return worlds.call(
        "train/distill.py", "--target", place / "world" / "target", "--data", place / "samples",
        "--out", place / out, "--loop.steps", 2, "--loop.batch_size", 8, "--loop.micro_batch", 4,
        "--loop.log_every", 1, "--loop.eval_every", 0, "--features_top", 1000, "--loop.max_length", 512,
        *COMMANDS[family], *init, *more,
    )  # fmt: skip


def losses_of(out: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (out / "metrics.jsonl").open()]


@pytest.mark.parametrize("family", COMMANDS)
def test_drafts_share_a_folder_and_the_target_rests(
    place: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the target still runs in every step; a family makes again what another made; the weights are others. The
    families come one after the other, each with the folder as the one before it left it."""
    store = place / "store"
    before = contents(store) if store.exists() else {}
    done = distill(place, f"{family}-made", family, "--features", store).ok()
    after = contents(store)
    assert {name: after[name] for name in before} == before
    made = {name.split("/")[0] for name in after.keys() - before.keys()}
    assert made == ADDS[family]
    assert ("bytes a token" in done.err) == bool(ADDS[family])
    # stderr is no terminal here: progress is logged in lines
    logged = re.search(r"^features (\d+)/\1, .* tokens/s", done.err, re.MULTILINE)
    assert bool(logged) == bool(ADDS[family])

    real, left = (
        LiveTeacher.get_output,
        [int(family == "eagle3")],
    )  # it measures a few states before it starts

    def never(self: LiveTeacher, batch: Batch) -> TeacherOutput:
        left[0] -= 1
        if left[0] < 0:
            raise AssertionError("the target ran")
        return real(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(LiveTeacher, "get_output", never)
        distill(place, f"{family}-again", family, "--features", store).ok()
        with pytest.raises(AssertionError, match="the target ran"):
            distill(place, f"{family}-never", family)
    weights = [
        (place / f"{family}-{name}" / "model.safetensors").read_bytes()
        for name in ("made", "again")
    ]
    assert weights[0] == weights[1]
    assert distill(place, f"{family}-live", family).code == 0
    cached, live = (losses_of(place / f"{family}-{name}") for name in ("made", "live"))
    assert cached == pytest.approx(live, rel=0.02)
    assert contents(store) == after


def test_a_seed_has_no_say_in_features(place: Path) -> None:
    """Bug: a setting that changes no state makes all of them again."""
    store = place / "of any seed"
    distill(place, "first", "causal", "--features", store).ok()
    done = distill(place, "seed", "causal", "--features", store, "--seed", 1).ok()
    assert "bytes a token" not in done.err
