"""A small language model that drafts some of the target's tokens only: its logits, its text, its folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.checkpoints.draft_folder import METADATA_FILE, draft_sha256
from decode.checkpoints.draft_vocab import VOCAB_FILE, save_ids
from decode.common.errors import UserError
from decode.drafts.base import Proposal
from decode.drafts.causal import CausalDraft
from decode.drafts.registry import load_draft
from decode.drafts.wrappers import RecordingDraft
from decode.engine.engine import decode
from decode.model import runner as runner_module
from decode.model.loading import Target, load_target
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from tests.decode.drafts.test_token_trees import SHAPES
from tests.decode.engine.test_engine import PROMPTS, WORDS, hf_text, save, texts
from tests.params import rotated
from tests.tiny import VOCAB, noisy, tiny_model, tiny_target

IDS = torch.arange(1, VOCAB, 2)  # half of the tokens, so that some drafts are right
SAMPLED = SamplingParams(1.0, top_k=20, top_p=0.9)
K = 3


def reduced(model: Any, shape: Any = None) -> CausalDraft:
    return CausalDraft(ModelRunner(noisy(model, 0.002), VOCAB, IDS), shape=shape)


def recorded(
    target: Target, draft: CausalDraft, sampling: SamplingParams
) -> tuple[list[Proposal], list[Any]]:
    """(proposals, outputs) of decoding PROMPTS together."""
    recording = RecordingDraft(draft)
    outputs = decode(target, recording, PROMPTS, k=K, max_new_tokens=20, sampling=sampling)
    return recording.proposals, outputs


# gpt_neox: a head of another name; phi: one with a bias; gemma2, granite: logits that are capped or scaled
@pytest.mark.parametrize("arch", ["llama", "phi", "gemma2", "gpt_neox", "granite"])
@torch.inference_mode()
def test_logits_are_those_of_the_whole_head(arch: str) -> None:
    """Catches rows of other tokens, a bias or a cap that is lost, and a whole head that is computed all the same."""
    model = tiny_model(arch)
    whole, some = ModelRunner(noisy(model, 0.0)), ModelRunner(model, None, IDS)
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, IDS, False)
    tokens, length = torch.tensor([[1, 60, 5], [2, 7, 0]]), torch.tensor([3, 2])
    calls = [lambda r: r.prefill(tokens, length), lambda r: r.step(tokens[:, :2], length)]
    for runner in (whole, some):
        runner.allocate(2, 8)
    for call in calls:
        want, got = call(whole), call(some)
        assert got.shape == want.shape
        torch.testing.assert_close(got[..., IDS], want[..., IDS], atol=1e-5, rtol=1e-5)
        assert (got[..., others] == float("-inf")).all()
    head = some.model.get_output_embeddings().weight
    assert head.shape[0] == len(IDS)
    assert head.is_contiguous()
    assert model.get_output_embeddings().weight.shape[0] == VOCAB  # the model itself stays whole


@pytest.mark.parametrize(("shape", "sampling"), rotated(SHAPES, [SamplingParams(), SAMPLED]))
def test_it_drafts_its_own_tokens_and_greedy_text_stays(
    shape: str, sampling: SamplingParams
) -> None:
    """Catches a proposed token that is not in the vocabulary, and a target whose text is restricted to it."""
    model = tiny_model("llama")
    proposals, outputs = recorded(tiny_target(model), reduced(model, SHAPES[shape]), sampling)
    for proposal in proposals:
        assert torch.isin(proposal.tokens, IDS).all()
        if proposal.q is not None:
            torch.testing.assert_close(proposal.q[..., IDS].sum(-1), torch.ones(()).expand(3, K))
    written = [token for text in texts(outputs) for token in text]
    assert not set(written) <= set(IDS.tolist())
    assert sum(accepted for output in outputs for _, accepted in output.rounds) > 0
    if sampling.greedy:
        assert texts(outputs) == [hf_text(model, p, max_new_tokens=20) for p in PROMPTS]


def rank_instead_of_id(logits: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """The planted bug: the draft's own ids are taken for the target's."""
    full = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
    full[..., : len(ids)] = logits
    return full


def test_ids_without_their_map_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above must fail for draft ids that are not mapped; the target's text stays even then."""
    monkeypatch.setattr(runner_module, "spread_logits", rank_instead_of_id)
    model = tiny_model("llama")
    proposals, outputs = recorded(tiny_target(model), reduced(model), SamplingParams())
    assert not all(torch.isin(proposal.tokens, IDS).all() for proposal in proposals)
    assert texts(outputs) == [hf_text(model, p, max_new_tokens=20) for p in PROMPTS]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(save(tmp_path_factory.mktemp("target"), WORDS), "cpu")


def saved(folder: Path, target: Target, ids: list[int], **changes: Any) -> Path:
    """A draft as training leaves it: the whole model, the ids, and what draftsmith.json says of both."""
    save(folder, WORDS, **changes)
    save_ids(folder, torch.tensor(ids))
    facts = {
        "family": "causal",
        "tokenizer_hash": target.fingerprint,
        "vocabulary": {"size": len(ids), "coverage": 0.9, "digest": "0" * 16},
        "draft_sha256": draft_sha256(str(folder)),
    }
    (folder / METADATA_FILE).write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize("rows", [60, VOCAB, VOCAB + 8])
def test_a_folder_is_loaded_with_its_ids(rows: int, target: Target, tmp_path: Path) -> None:
    """Catches ids that are not read, and a model that is padded to another size than the target."""
    ids = list(range(2, 60, 3))
    draft = load_draft(str(saved(tmp_path, target, ids, vocab_size=rows)), target)
    assert isinstance(draft, CausalDraft)
    draft.runner.allocate(1, 9)
    logits = draft.runner.prefill(torch.tensor([[1, 2, 3]]), torch.tensor([3]))
    assert logits.shape == (1, VOCAB)
    assert logits.isfinite()[0].nonzero()[:, 0].tolist() == ids
    prompts = [prompt[:8] for prompt in PROMPTS]
    assert texts(decode(target, draft, prompts, k=2, max_new_tokens=8)) == texts(
        decode(target, None, prompts, max_new_tokens=8)
    )


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"ids": [3, 9', "not valid JSON"),
        ('{"tokens": [3]}', "no 'ids'"),
        ('{"ids": []}', "rise within"),
        ('{"ids": [3, "9"]}', "rise within"),
        ('{"ids": [3, true]}', "rise within"),
        ('{"ids": [9, 3]}', "rise within"),
        ('{"ids": [3, 3]}', "rise within"),
        ('{"ids": [-1, 3]}', "rise within"),
        (f'{{"ids": [3, {VOCAB}]}}', "another target"),
        (f'{{"ids": [3, {10**40}]}}', "another target"),
    ],
)
def test_damaged_ids_are_one_line(content: str, named: str, target: Target, tmp_path: Path) -> None:
    """Catches a traceback, or a draft that loads with ids which mean other tokens."""
    folder = saved(tmp_path, target, [3, 9])
    (folder / VOCAB_FILE).write_text(content)
    with pytest.raises(UserError, match=named) as caught:
        load_draft(str(folder), target)
    assert VOCAB_FILE in str(caught.value)


def test_lost_and_altered_ids_are_seen(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a reduced draft that decodes as a whole one once its file is lost, and a checksum without the ids."""
    folder = saved(tmp_path, target, [3, 9])
    save_ids(folder, torch.tensor([3, 10]))
    load_draft(str(folder), target)
    assert "has other weights" in capsys.readouterr().err
    (folder / VOCAB_FILE).unlink()
    with pytest.raises(UserError, match="get its files again"):
        load_draft(str(folder), target)
