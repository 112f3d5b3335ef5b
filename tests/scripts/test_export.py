"""Exported small LMs have the target's vocabulary size, which engines ask for."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import load_target
from scripts.engine_compat.exporters import export_hf
from tests.decode.engine.test_engine import PROMPTS, WORDS, save
from tests.tiny import VOCAB


@pytest.mark.parametrize("rows", [VOCAB - 20, VOCAB, VOCAB + 8])
def test_an_exported_draft_has_the_targets_rows(rows: int, tmp_path: Path) -> None:
    """Catches a draft that decodes here and cannot be exported, and rows that are probable after the export."""
    name = save(tmp_path / "target", WORDS)
    path = save(tmp_path / "draft", WORDS, vocab_size=rows)
    (tmp_path / "out").mkdir()
    export_hf(path, name, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.get_output_embeddings().weight.shape[0] == model.config.vocab_size == VOCAB
    target = load_target(name, "cpu")
    rounds = [
        [o.rounds for o in decode(target, load_draft(one, target), PROMPTS, k=3, max_new_tokens=12)]
        for one in (path, str(tmp_path / "out"))
    ]
    assert rounds[0] == rounds[1] or rows < VOCAB  # new rows stand for tokens that the draft lacked
