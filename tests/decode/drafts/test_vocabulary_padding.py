"""Models of one tokenizer whose embeddings are padded to different sizes are one vocabulary."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.drafts.causal import CausalDraft
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import load_target
from decode.model.runner import ModelRunner
from decode.verification.sampling import SamplingParams
from decode.verification.tree import DynamicTree, TreeShape
from tests.decode.engine.test_engine import PROMPTS, WORDS, hf_text, save, texts
from tests.tiny import VOCAB, noisy, tiny_model, tiny_target

SAMPLED = SamplingParams(1.0, top_p=0.9)
FEWER, MORE = 60, VOCAB + 8


def resized(model: Any, rows: int) -> Any:
    """A copy with `rows` rows; new ones of the LM head are so long that their ids are the most probable ones."""
    other = copy.deepcopy(model)
    other.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        other.get_output_embeddings().weight[VOCAB:] *= 1000
    return other


@pytest.mark.parametrize("shape", [None, DynamicTree(3, 8)])
@pytest.mark.parametrize("rows", [FEWER, MORE])
def test_text_and_acceptance(rows: int, shape: TreeShape) -> None:
    """Catches p and q of different widths, an id that the target lacks in a proposal (it would be read as another),
    and a token of the target that the draft's embedding lacks."""
    model = tiny_model("llama")
    target = tiny_target(model)
    draft = CausalDraft(ModelRunner(resized(noisy(model, 0.002), rows), VOCAB), shape=shape)
    outputs = decode(target, draft, PROMPTS, k=3, max_new_tokens=20)
    want = [hf_text(model, prompt, max_new_tokens=20) for prompt in PROMPTS]
    assert texts(outputs) == want
    assert max(map(max, want)) >= FEWER
    accepted = max(accepted for output in outputs for _, accepted in output.rounds)
    assert accepted == 3 if rows == MORE else accepted > 0
    sampled = decode(target, draft, PROMPTS, k=3, max_new_tokens=20, sampling=SAMPLED)
    assert max(map(max, texts(sampled))) < VOCAB


@pytest.mark.parametrize("rows", [FEWER, MORE])
def test_the_draft_has_no_mass_on_ids_that_one_of_them_lacks(rows: int) -> None:
    """Catches padding by zeros, which have mass, and q that does not add up to 1 over the target's ids."""
    runner = ModelRunner(resized(tiny_model("llama"), rows), VOCAB)
    runner.allocate(1, 8)
    tokens, length = torch.tensor([[1, FEWER + 3, 5]]), torch.tensor([3])
    own = runner.model(input_ids=tokens.clamp_max(rows - 1)).logits[:, -1]
    logits = runner.prefill(tokens, length)
    assert logits.shape == (1, VOCAB)
    torch.testing.assert_close(logits[:, :rows], own[:, :VOCAB], atol=1e-5, rtol=1e-5)
    assert (logits[:, rows:] == float("-inf")).all()


def test_a_saved_pair_loads(tmp_path: Path) -> None:
    """Catches pairs of one tokenizer that are refused, as Qwen2.5 0.5B with 7B and Gemma 3 1B with 27B."""
    target = load_target(save(tmp_path / "target", WORDS), "cpu")
    for rows in (FEWER, MORE):
        draft = load_draft(save(tmp_path / str(rows), WORDS, vocab_size=rows), target)
        assert texts(decode(target, draft, PROMPTS, k=2, max_new_tokens=8)) == texts(
            decode(target, None, PROMPTS, max_new_tokens=8)
        )
