"""A small LM trained on the target's most frequent tokens alone: its loss, its folder, and every way to come by one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from decode.checkpoints.draft_folder import draft_sha256
from decode.checkpoints.draft_vocab import VOCAB_FILE
from decode.drafts.base import Draft
from decode.drafts.registry import load_draft
from decode.drafts.wrappers import RecordingDraft
from decode.engine.engine import decode
from decode.model import attention
from decode.model.hidden_states import HiddenStateSpec
from decode.model.loading import Target, load_config
from tests import worlds
from tests.params import rotated
from tests.tiny import VOCAB, noisy, reference, tiny_model, tiny_prompts, tiny_target
from tests.train.families.test_causal_init import rows_of
from tests.train.families.test_causal_training import learned
from tests.train.families.test_heads_training import SAMPLES, assert_same
from tests.train.test_distill_command import COMMAND, STEPS, WEIGHTS, arguments, distill, facts_of
from tests.worlds import Done, World
from train.data import batching, sample_store, vocab_mapping
from train.families.base import FamilyContext, TrainableDraft
from train.families.builders import build_trainable
from train.families.causal import CausalTrainer
from train.families.settings.base import FamilySettings, vocab_size
from train.families.settings.causal import CausalSettings
from train.hub import publish
from train.hub.evidence import Evidence
from train.losses import chunked_sums
from train.losses.objective import Criterion
from train.planning.shape_run import LOGITS, ShapeRun, made_up_rows
from train.settings.training import DivergenceConfig, HubLabels
from train.teacher.live import LiveTeacher
from train.trainer.settings import DistillConfig

IDS = torch.arange(1, VOCAB, 3)
SIZE = 60  # of the world's 268 tokens


# ---- the loss ----


def reduced_trainer(
    model: Any, loss: str, how: DivergenceConfig | None = None
) -> tuple[CausalTrainer, LiveTeacher]:
    """A disturbed copy of its target that drafts IDS."""
    teacher = LiveTeacher(tiny_target(model), HiddenStateSpec())
    lm = noisy(model, 0.05)
    lm.set_attn_implementation(attention.ATTENTION_NAME)
    return CausalTrainer(lm, teacher.head, Criterion(loss, how), IDS), teacher


def masked_losses(p_logits: Tensor, q_logits: Tensor, loss: str) -> Tensor:
    """[N] by the definitions, over the whole vocabulary, of a q with probability 0 outside IDS."""
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, IDS, False)
    q = torch.log_softmax(q_logits.masked_fill(others, -1e9), -1)
    if loss == "tv":
        return 1 - torch.minimum(torch.softmax(p_logits, -1), q.exp()).sum(-1)
    p = torch.log_softmax(p_logits.masked_fill(others, -1e9), -1)  # KL: p given IDS
    return (p.exp() * (p - q)).sum(-1)


# gemma2: capped logits; phi: a head with a bias
@pytest.mark.parametrize(
    ("arch", "loss"), rotated(["llama", "gemma2", "phi"], ["forward_kl", "tv"])
)
def test_the_loss_is_that_of_a_whole_head_with_masked_columns(arch: str, loss: str) -> None:
    """Catches columns of other tokens, p that is not restricted as the divergence needs, a lost bias or cap, an
    agreement counted within the draft's own vocabulary, and rows of other tokens that learn."""
    model = tiny_model(arch)
    trainer, teacher = reduced_trainer(model, loss)
    sums, grads = learned(trainer, teacher, batching.collate(SAMPLES[:4], 0))
    plain, own = reference(model), reference(noisy(model, 0.05))
    want = {"loss": 0.0, "overlap": 0.0, "top1": 0.0}
    for row in SAMPLES[:4]:
        ids, at = torch.tensor([list(row["input_ids"])]), batching.supervised_positions(row)
        with torch.no_grad():
            p_logits = plain(input_ids=ids, use_cache=False).logits[0, at]
        q_logits = own(input_ids=ids, use_cache=False).logits[0, at]
        total = masked_losses(p_logits, q_logits, loss).sum()
        total.backward()
        want["loss"] += float(total.detach())
        want["overlap"] += float((1 - masked_losses(p_logits, q_logits, "tv")).sum().detach())
        drafted = IDS[q_logits[:, IDS].argmax(-1)]
        want["top1"] += float((p_logits.argmax(-1) == drafted).sum())
    assert_same((sums, grads), (want, {f"lm.{n}": p.grad for n, p in own.named_parameters()}))
    head = grads["lm.lm_head.weight"]
    assert head.abs().sum(1).nonzero()[:, 0].tolist() == IDS.tolist()


@pytest.mark.parametrize("tied", [False, True])
def test_in_chunks_it_is_the_same(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows whose gradient comes from the last chunk only; tied ones have one from both their uses."""
    how = DivergenceConfig(temperature=1.5, top=9)
    trainer, teacher = reduced_trainer(
        tiny_model("llama", tie_word_embeddings=tied), "forward_kl", how
    )
    batch = batching.collate(SAMPLES, 0)
    plain = learned(trainer, teacher, batch)
    monkeypatch.setattr(chunked_sums, "max_chunk_rows", lambda vocab_size: 7)
    assert_same(learned(trainer, teacher, batch), plain)


# ---- where such a draft comes from ----


SOURCES: dict[str, dict[str, Any]] = {
    "init": {}, "lora": {"lora_rank": 2}, "layers": {"layers": [1]},
    "random": {"init_config": {"num_hidden_layers": 1}},
}  # fmt: skip


def trained(target: Target, draft: FamilySettings) -> TrainableDraft:
    """After two steps that move whatever is trained."""
    rows = rows_of(12, 20, 9)
    context = FamilyContext(DistillConfig(draft=draft), target, rows)
    trainee = build_trainable(draft, context)
    learning = [p for p in trainee.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=0.02, weight_decay=0.0)
    for _ in range(2):
        trainee.loss(trainee.model, batching.collate(rows, pad_id=0))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return trainee


def proposals(target: Target, draft: Draft) -> list[list[list[int]]]:
    """What the draft proposes, in fixed rounds."""
    recording = RecordingDraft(draft)
    decode(target, recording, tiny_prompts(9, 14, vocab=200), k=3, max_new_tokens=12)
    return [proposal.tokens.tolist() for proposal in recording.proposals]


@pytest.mark.parametrize("source", SOURCES)
def test_it_drafts_the_same_before_and_after_saving(
    source: str, world: World, target: Target, tmp_path: Path
) -> None:
    """Catches ids that are saved in another order or not at all, a saved model without its whole head, and a source of
    weights for which the vocabulary is forgotten."""
    init = "" if source in ("layers", "random") else str(world.draft)
    trainee = trained(target, CausalSettings(init=init, vocab=SIZE, **SOURCES[source]))
    trainee.save(tmp_path)
    ids = json.loads((tmp_path / VOCAB_FILE).read_text())["ids"]
    assert len(ids) == SIZE
    assert set(worlds.EOS) < set(ids)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.vocab_size == len(model.lm_head.weight) == target.runner.vocab_size
    assert [file.name for file in tmp_path.glob("*.safetensors")] == [WEIGHTS]  # vLLM reads all
    before = proposals(target, trainee.to_draft())
    assert {token for rows in before for row in rows for token in row} <= set(ids)
    assert proposals(target, load_draft(str(tmp_path), target)) == before


def test_rows_of_other_tokens_stay(world: World, target: Target, tmp_path: Path) -> None:
    """Catches a head that is cut or zeroed, which engines would draft with, and a vocabulary of rare tokens."""
    trained(target, CausalSettings(init=str(world.draft), vocab=SIZE)).save(tmp_path)
    before, after = (load_file(Path(p) / WEIGHTS) for p in (world.draft, tmp_path))
    moved = (before["lm_head.weight"] != after["lm_head.weight"]).any(1).nonzero()[:, 0]
    assert moved.tolist() == json.loads((tmp_path / VOCAB_FILE).read_text())["ids"]
    counts = vocab_mapping.count_tokens(rows_of(12, 20, 9), target.runner.vocab_size)
    assert set(counts.nonzero()[:, 0].tolist()) <= set(moved.tolist())


def test_the_whole_vocabulary_is_the_default(world: World, target: Target, tmp_path: Path) -> None:
    """Catches EAGLE-3's default, and 0, taken for a reduced vocabulary."""
    for vocab in (None, 0, 268, 32_000):
        trainee = trained(target, CausalSettings(init=str(world.draft), vocab=vocab))
        assert trainee.metadata == {}
        trainee.save(tmp_path)
        assert not (tmp_path / VOCAB_FILE).exists()


def test_the_size_of_a_vocabulary() -> None:
    assert vocab_size(None, 268) == vocab_size(0, 268, 40) == 268
    assert vocab_size(None, 268, 40) == 40


def test_the_estimate_counts_the_rows_that_are_computed(
    world: World, target: Target, tmp_path: Path
) -> None:
    """Catches a dry run that counts the whole head, and one that forgets the vocabulary of draft.init."""

    def cost(init: Path, vocab: int | None) -> tuple[int, int]:
        s = DistillConfig(draft=CausalSettings(init=str(init), vocab=vocab))
        run = ShapeRun(s, load_config(str(world.target), "target"))
        step = run.step(made_up_rows(1, 40, 20, run.vocab), mixed=False)
        return run.trained, step.memory[LOGITS]

    whole, some = cost(world.draft, 0), cost(world.draft, SIZE)
    assert some[0] == whole[0]
    assert some[1] < whole[1]
    trained(target, CausalSettings(init=str(world.draft), vocab=SIZE)).save(tmp_path)
    assert cost(tmp_path, None) == some


# ---- the command ----


@pytest.fixture(scope="module")
def reduced(world: World, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that the command trained from start to end."""
    out = tmp_path_factory.mktemp("reduced") / "out"
    distill(world, data, out, "--draft.vocab", SIZE).ok()
    return out


@pytest.fixture
def train(world: World, data: Path, tmp_path: Path) -> Callable[..., Done]:
    return lambda *more: distill(world, data, tmp_path / "out", *more)


def ids_of(folder: Path) -> list[int]:
    ids: list[int] = json.loads((folder / VOCAB_FILE).read_text())["ids"]
    return ids


def test_what_is_recorded(reduced: Path) -> None:
    """Catches a vocabulary that draftsmith.json does not name, or whose file its checksum does not cover."""
    facts, ids = facts_of(reduced), torch.tensor(ids_of(reduced))
    assert facts["vocabulary"]["size"] == SIZE
    assert facts["vocabulary"]["digest"] == vocab_mapping.digest(ids)
    assert 0.3 < facts["vocabulary"]["coverage"] < 1
    assert facts["training"]["draft"]["vocab"] == SIZE
    assert facts["draft_sha256"] == draft_sha256(str(reduced))


def test_greedy_text_is_the_targets(reduced: Path, world: World, target: Target) -> None:
    """Catches a target that can only say what the draft can."""
    prompts = [target.tokenizer(text)["input_ids"] for text in world.texts[:6]]
    own = decode(target, None, prompts, max_new_tokens=24)
    drafted = decode(target, load_draft(str(reduced), target), prompts, k=3, max_new_tokens=24)
    assert [o.output_ids for o in drafted] == [o.output_ids for o in own]
    assert not {token for o in own for token in o.output_ids} <= set(ids_of(reduced))


def test_killed_and_started_again_ends_with_the_same_bits(
    reduced: Path, world: World, data: Path, tmp_path: Path
) -> None:
    """Catches a resumed run with the whole head, or with ids that are counted otherwise."""
    out = tmp_path / "out"
    pointer = out / "checkpoints" / "latest"
    command = [*arguments(world, data, out), "--draft.vocab", SIZE]
    assert worlds.kill_when(pointer.is_file, COMMAND, *command) == -9
    done = worlds.call(COMMAND, *command).ok()
    assert "from step 0" not in done.err
    for name in (WEIGHTS, VOCAB_FILE):
        assert (out / name).read_bytes() == (reduced / name).read_bytes()


def test_training_goes_on_with_the_same_vocabulary(
    reduced: Path, train: Callable[..., Done], tmp_path: Path
) -> None:
    """Catches ids that are counted again, or lost, for weights that were trained on others; and a setting that is
    ignored."""
    train("--draft.init", reduced, "--loop.steps", 2).ok()
    assert ids_of(tmp_path / "out") == ids_of(reduced)
    assert facts_of(tmp_path / "out")["vocabulary"] == facts_of(reduced)["vocabulary"]
    for size in (0, SIZE + 1):
        again = ["--draft.init", reduced, "--draft.vocab", size, "--overwrite", "true"]
        assert f"draft.vocab is {size}" in train(*again).error()


def test_a_vocabulary_without_room_for_the_ends_is_refused(train: Callable[..., Done]) -> None:
    """Catches a draft that can never propose the end of a text."""
    assert "cannot hold 12 tokens" in train("--draft.vocab", 11).error()


def test_texts_of_its_own_keep_to_its_vocabulary(
    train: Callable[..., Done], tmp_path: Path
) -> None:
    """Catches on-policy texts from rows of the head that were not trained, which decoding never uses."""
    train("--draft.vocab", SIZE, "--on_policy.share", 0.5, "--on_policy.every", STEPS).ok()
    out, written = tmp_path / "out", set()
    for folder in (out / "on_policy").iterdir():
        for row in sample_store.read_shards(folder):
            [[start, end]] = row["loss_spans"]
            written |= set(row["input_ids"][start:end])
    assert len(written) > 10
    assert written <= set(ids_of(out))


def test_a_dry_run_writes_nothing(train: Callable[..., Done], tmp_path: Path) -> None:
    """Catches a rehearsal that cannot save or measure such a draft."""
    train("--draft.vocab", SIZE, "--dry_run", "true").ok()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", [["--overwrite"], ["--resume"]])
def test_a_draft_of_all_tokens_has_no_ids_of_an_earlier_run(
    how: list[str], train: Callable[..., Done], target: Target, tmp_path: Path
) -> None:
    """Catches a draft of the whole vocabulary that decodes as the reduced one that lay there."""
    assert train("--draft.vocab", SIZE, "--loop.steps", 1).code == 0
    assert (tmp_path / "out" / VOCAB_FILE).exists()
    train("--loop.steps", 2, *how, "true").ok()
    assert not (tmp_path / "out" / VOCAB_FILE).exists()
    assert "vocabulary" not in facts_of(tmp_path / "out")
    load_draft(str(tmp_path / "out"), target)


# ---- on from the folder ----


def test_it_is_published_with_its_ids(reduced: Path, target: Target, tmp_path: Path) -> None:
    """Catches a published draft that lacks the file, and a card that does not say what engines do."""
    publish.build_draft_folder(
        reduced, Evidence(), "me/draft", HubLabels(), tmp_path / "hub", DistillConfig
    )
    assert ids_of(tmp_path / "hub") == ids_of(reduced)
    assert facts_of(tmp_path / "hub")["vocabulary"] == facts_of(reduced)["vocabulary"]
    assert draft_sha256(str(tmp_path / "hub")) == draft_sha256(str(reduced))
    card = (tmp_path / "hub" / "README.md").read_text()
    assert f"It drafts {SIZE} of 268 tokens" in card
    assert "whole LM head" in card
    load_draft(str(tmp_path / "hub"), target)


def test_it_is_exported_with_its_ids(
    reduced: Path, world: World, target: Target, tmp_path: Path
) -> None:
    """Catches a copy that drafts with the whole head."""
    worlds.call(
        "scripts/export.py", reduced, "--format", "hf", "--target", world.target, "--out", tmp_path / "x",
    ).ok()  # fmt: skip
    assert ids_of(tmp_path / "x") == ids_of(reduced)
    assert proposals(target, load_draft(str(tmp_path / "x"), target)) == proposals(
        target, load_draft(str(reduced), target)
    )
