"""Drafts whose tokenizer has a few tokens more or fewer than the target's, all shared ids equal."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from decode.checkpoints.draft_folder import METADATA_FILE
from decode.common.errors import UserError
from decode.common.typed_json import to_json
from decode.drafts.causal import CausalDraft, load
from decode.drafts.other_tokenizer import OtherTokenizerDraft
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import Target, load_target, tokenizer_fingerprint
from decode.model.vocabularies import disagreement
from decode.serving.checks import wrong_tokenizer
from decode.serving.rules import read_draft, read_target
from decode.serving.target_outline import load_without_target
from decode.verification.sampling import SamplingParams
from scripts.export import ExportConfig, main
from tests import heads
from tests.tiny import noisy, tiny_model
from tests.worlds import byte_tokenizer, save
from train.families.causal import build_causal_lm
from train.families.settings.causal import CausalSettings

BASE = len(byte_tokenizer())


def extended(*tokens: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def pair(
    folder: Path, own: PreTrainedTokenizerFast, wanted: PreTrainedTokenizerFast, rows: int = 0, wanted_rows: int = 0
) -> tuple[str, Target]:  # fmt: skip
    """(folder of a draft, target) with these tokenizers, and embeddings of as many rows or those given."""
    model = tiny_model("llama", vocab_size=wanted_rows or len(wanted), num_hidden_layers=1)
    draft = noisy(model, 0.02)
    draft.resize_token_embeddings(rows or len(own), mean_resizing=False)
    save(folder / "target", model, wanted)
    save(folder / "draft", draft, own)
    return str(folder / "draft"), load_target(str(folder / "target"), "cpu")


TWO = ("<think>", "</think>")
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...], int, int, set[int]]] = {
    "the target has two more": ((), TWO, 0, 0, {BASE, BASE + 1}),
    "the draft has rows for them": ((), TWO, BASE + 12, 0, {BASE, BASE + 1}),
    "both are padded": ((), TWO, BASE + 12, BASE + 20, {BASE, BASE + 1, *range(BASE + 12, BASE + 20)}),
    "the draft has two more": (TWO, (), 0, 0, set()),
    "the draft has two more, the target rows for them": (TWO, (), 0, BASE + 2, {BASE, BASE + 1}),
    "one is shared": (TWO[:1], (*TWO, "<x>"), BASE + 3, BASE + 3, {BASE + 1, BASE + 2}),
}  # fmt: skip
"""Tokens added to the draft's and the target's tokenizer, their rows, and the ids that are never drafted."""


@pytest.mark.parametrize("case", CASES)
def test_vocabularies_that_extend_each_other_are_one(case: str, tmp_path: Path) -> None:
    """Catches a pair that is refused, unknown tokens that are drafted, an id without a row in the draft's embedding,
    and text that is not the target's."""
    own, wanted, rows, wanted_rows, never = CASES[case]
    path, target = pair(tmp_path, extended(*own), extended(*wanted), rows, wanted_rows)
    draft = load(path, target, "cpu", "float32")
    assert isinstance(draft, CausalDraft)
    size = target.runner.vocab_size
    draft.runner.allocate(1, 8)
    unknown = torch.tensor([[5, size - 1, size - 2]])
    logits = draft.runner.step(unknown, torch.zeros(1, dtype=torch.long))
    assert logits.shape[-1] == size
    assert set(torch.where(logits[0, 0].isneginf())[0].tolist()) == never
    prompts = [[BASE - 1, 20, size - 1], [30, 40, 50, size - 2, 60]]
    for sampling in (SamplingParams(0.0), SamplingParams(1.0)):
        plain = decode(target, None, prompts, max_new_tokens=40, seed=3, sampling=sampling)
        found = decode(target, draft, prompts, k=3, max_new_tokens=40, seed=3, sampling=sampling)
        if sampling.greedy:
            assert [o.output_ids for o in found] == [o.output_ids for o in plain]
        assert sum(a for o in found for _, a in o.rounds) > 0
    files = read_draft(path, read_target(target.name, tokenizer=True))
    assert list(wrong_tokenizer(files)) == []
    trained = build_causal_lm(CausalSettings(init=path), target, "cpu")
    assert len(trained.get_output_embeddings().weight) == size


def test_the_text_follows_the_targets_distribution(tmp_path: Path) -> None:
    """Catches an acceptance that takes a draft's probability of an unknown token for another than 0."""
    path, target = pair(tmp_path, byte_tokenizer(), extended(*TWO), rows=BASE + 2)
    head = target.runner.model.get_output_embeddings().weight
    with torch.no_grad():
        head.mul_(0.2)
        head[BASE - 2 :] *= 5
    draft = load(path, target, "cpu", "float32")
    prompts, sampling = [[20, 30, 40]] * 1500, SamplingParams(1.0)
    counts = []
    for number, one in enumerate((None, draft)):
        found = decode(
            target, one, prompts, k=2, rows=500, max_new_tokens=3, seed=number, sampling=sampling
        )
        tokens = [token for o in found for token in o.output_ids[1:]]
        counts.append([tokens.count(BASE), tokens.count(BASE + 1)])
    for plain, own in zip(*counts, strict=True):
        assert plain > 5
        assert abs(plain - own) < 4 * (plain + own) ** 0.5


def moved(first: str, second: str) -> PreTrainedTokenizerFast:
    """The byte tokenizer with the ids of two tokens exchanged."""
    text = byte_tokenizer().backend_tokenizer.to_str()
    swapped = text.replace(f'"{first}":', '"?":').replace(f'"{second}":', f'"{first}":')
    backend = type(byte_tokenizer().backend_tokenizer).from_str(
        swapped.replace('"?":', f'"{second}":')
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


HEADS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "the target has two more": ((), TWO, ""),
    "the heads' target had one more": (TWO[:1], (), ""),
    "one is shared": (TWO[:1], TWO, ""),
    "one id is two tokens": (
        TWO[1:], TWO, f", id {BASE} is '</think>' for the draft and '<think>' for the target: use",
    ),
    "the tokenizer is gone": ((), TWO, "disagree on token ids: use"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_heads_of_an_extended_vocabulary(case: str, family: str, tmp_path: Path) -> None:
    """Catches heads that are refused for tokens that were added to their target's tokenizer, or decoded where one id is
    two tokens. Before, hashes alone were compared: all were refused."""
    then, now, said = HEADS[case]
    model = tiny_model("llama", vocab_size=BASE + 4)  # the embedding had padded rows
    for name, tokens in (("then", then), ("now", now)):
        save(tmp_path / name, model, extended(*tokens))
    old, target = (load_target(str(tmp_path / name), "cpu") for name in ("then", "now"))
    path = heads.save(
        tmp_path / "draft", family, heads.net_of(family, old, 0), old, torch.float32
    )  # fmt: skip
    facts = json.loads((Path(path) / METADATA_FILE).read_text()) | {
        "target": to_json(old.describe())
    }
    (Path(path) / METADATA_FILE).write_text(json.dumps(facts))
    if case == "the tokenizer is gone":
        save(tmp_path / "then", model, extended("<other>"))
    if said:
        with pytest.raises(UserError, match=re.escape(said)):
            load_draft(path, target, "cpu", "float32")
        with pytest.raises(UserError, match=re.escape(said)):
            load_without_target(path, target.name)
        return
    load_without_target(path, target.name)
    draft = load_draft(path, target, "cpu", "float32")
    prompts = [[20, 30, 40], [50, 60]]
    plain = decode(target, None, prompts, max_new_tokens=16)
    found = decode(target, draft, prompts, k=2, max_new_tokens=16)
    assert [o.output_ids for o in found] == [o.output_ids for o in plain]


A, B = byte_tokenizer().convert_tokens_to_ids(["a", "b"])
REAL: dict[str, tuple[Any, Any, str]] = {
    "letters": (moved("a", "b"), byte_tokenizer(), f"id {A} is 'b' for the draft and 'a' for the target"),
    "letters of a longer one": (
        moved("a", "b"), extended(*TWO), f"id {A} is 'b' for the draft and 'a' for the target",
    ),
    "added tokens": (
        extended("<user>"), extended(*TWO), f"id {BASE} is '<user>' for the draft and '<think>' for the target",
    ),
    "the second one": (
        extended("<think>", "<x>"), extended(*TWO),
        f"id {BASE + 1} is '<x>' for the draft and '</think>' for the target",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REAL)
def test_a_real_disagreement_names_one_id(case: str, tmp_path: Path) -> None:
    """Catches a pair that reads one id as two tokens, in training or in decoding, and a refusal that leaves the user to
    search for it."""
    own, wanted, named = REAL[case]
    path, target = pair(tmp_path, own, wanted)
    with pytest.raises(UserError) as caught:
        build_causal_lm(CausalSettings(init=path), target, "cpu")
    assert f"disagree on token ids, {named}: use a draft" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(load_draft(path, target), OtherTokenizerDraft)
    files = read_draft(path, read_target(target.name, tokenizer=True))
    (line,) = wrong_tokenizer(files)
    assert line.endswith(named)
    assert disagreement(wanted, wanted) is None


@pytest.mark.parametrize("case", ["the target has two more", "the draft has two more"])
def test_an_export_has_the_targets_vocabulary(case: str, tmp_path: Path) -> None:
    """Catches an export that its own record of the tokenizer refuses, or with other rows than the target."""
    own, wanted, rows, wanted_rows, _ = CASES[case]
    path, target = pair(tmp_path, extended(*own), extended(*wanted), rows, wanted_rows)
    facts = {"family": "causal", "tokenizer_hash": tokenizer_fingerprint(extended(*own))}
    (Path(path) / METADATA_FILE).write_text(json.dumps(facts))
    main(ExportConfig(path, "hf", str(tmp_path / "out"), target.name))
    exported = load_draft(str(tmp_path / "out"), target, "cpu", "float32")
    assert isinstance(exported, CausalDraft)
    assert exported.runner.left_out is None
    assert exported.runner.missing_columns == 0
