"""A small language model laid on the vocabulary of a target with another tokenizer: rows, text, training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from decode.checkpoints.draft_folder import METADATA_FILE, draft_sha256, read_metadata
from decode.common.errors import UserError
from decode.drafts.causal import CausalDraft
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import Target, load_target, tokenizer_fingerprint
from decode.model.vocabularies import Spelling
from decode.serving import transplant
from scripts.export import ExportConfig, main
from tests.spellings import KINDS, TEXTS
from tests.tiny import tiny_model
from train.families.causal import build_causal_lm
from train.families.settings.causal import CausalSettings

PAIRS = [
    ("bytes of prose", "bytes of code"),
    ("pieces of prose", "bytes of prose"),
    ("bytes of code", "pieces of letters"),
    ("pieces of letters", "pieces of prose"),
]


def saved(folder: Path, kind: str, seed: int, arch: str = "llama", **changes: Any) -> str:
    tokenizer = KINDS[kind]()
    size = {"vocab_size": len(tokenizer) + 3, "num_hidden_layers": 1} | changes
    model = tiny_model(arch, seed, **size)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def transplanted(folder: Path, pair: tuple[str, str], **changes: Any) -> tuple[str, str, Target]:
    """(folder of the draft, that of its copy on the target's vocabulary, the target)."""
    own = saved(folder / "draft", pair[0], 1, **changes)
    target = load_target(saved(folder / "target", pair[1], 2), "cpu")
    main(ExportConfig(own, "transplant", str(folder / "copy"), target.name))
    return own, str(folder / "copy"), target


def tables(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path)
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def wrong_rows(own: str, copy: str) -> list[str]:
    """The target's tokens whose rows are not those that a slow look at both vocabularies gives."""
    spellings = []
    for path, at in ((own, 0), (copy, 1)):
        tokenizer = load_target(path, "cpu").tokenizer
        spellings.append(Spelling(tokenizer, len(tables(path)[at])))
    draft, target = spellings
    found = []
    for old, new in zip(tables(own), tables(copy), strict=True):
        for number, piece in target.pieces.items():
            names = [n for n, x in draft.pieces.items() if x == piece]
            rows = [old[n] for n in names]
            if number in target.special and not names:
                continue  # by role, or spelt as a text
            if not names:
                # Behind a line feed the draft's tokenizer puts no space in front.
                parts = draft.encode(b"\n" + piece)
                while len(draft.join(parts)) > len(piece):
                    parts = parts[1:]
                if draft.join(parts) != piece:
                    parts = draft.encode(piece)
                rows = [old[parts].mean(0)]
            if not any(torch.allclose(new[number], row, atol=1e-6) for row in rows):
                found.append(repr(piece))
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids=" → ".join)
def test_rows_lie_on_the_targets_tokens(
    pair: tuple[str, str], tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a row at another token, a mean of other rows, a head that is untied, a vocabulary of another size,
    another tokenizer, and a folder that does not say what it was."""
    own, copy, target = transplanted(tmp_path, pair, tie_word_embeddings=tied)
    said = capsys.readouterr().out
    assert wrong_rows(own, copy) == []
    embedding, head = tables(copy)
    assert len(embedding) == len(head) == target.runner.vocab_size
    model = AutoModelForCausalLM.from_pretrained(copy)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert model.config.eos_token_id == target.tokenizer.eos_token_id
    facts = read_metadata(copy)
    assert facts.transplanted is not None
    assert f"{facts.transplanted.shared} of the target's {facts.transplanted.tokens} tokens" in said
    assert 200 < facts.transplanted.shared < facts.transplanted.tokens == len(target.tokenizer)
    assert facts.exported_from == draft_sha256(own)
    assert facts.draft_sha256 == draft_sha256(copy)
    assert facts.transplanted.source.tokenizer == tokenizer_fingerprint(KINDS[pair[0]]())
    assert facts.tokenizer_hash == target.fingerprint
    assert own in json.loads((Path(copy) / METADATA_FILE).read_text())["transplanted"]["source"]["name"]  # fmt: skip


def test_a_planted_wrong_row_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above must see rows of two tokens exchanged, and the first part's row in place of the mean."""
    usual = transplant.source_rows

    def exchanged(*arguments: Any) -> list[list[int]]:
        rows = usual(*arguments)
        return [*rows[:70], rows[71], rows[70], *rows[72:]]

    for number, bug in enumerate((exchanged, lambda *a: [rows[:1] for rows in usual(*a)])):
        monkeypatch.setattr(transplant, "source_rows", bug)
        own, copy, _ = transplanted(tmp_path / str(number), PAIRS[0])
        assert len(wrong_rows(own, copy)) >= 2


@pytest.mark.parametrize("arch", ["llama", "gpt2", "phi"])
@pytest.mark.parametrize("pair", PAIRS[:2], ids=" → ".join)
def test_the_copy_is_an_ordinary_draft(pair: tuple[str, str], arch: str, tmp_path: Path) -> None:
    """Catches a copy that does not load, changes the target's text, or cannot be trained on."""
    _, copy, target = transplanted(tmp_path, pair, arch=arch)
    draft = load_draft(copy, target)
    assert isinstance(draft, CausalDraft)
    assert draft.runner.left_out is None
    prompts = [target.tokenizer(text[:20])["input_ids"] for text in TEXTS.values()]
    found = decode(target, draft, prompts, k=3, max_new_tokens=24)
    plain = decode(target, None, prompts, max_new_tokens=24)
    assert [o.output_ids for o in found] == [o.output_ids for o in plain]
    trained = build_causal_lm(CausalSettings(init=copy), target, "cpu")
    ids = torch.tensor(prompts[:1])
    trained(input_ids=ids, labels=ids).loss.backward()
    gradient = trained.get_output_embeddings().weight.grad
    assert len(gradient) == target.runner.vocab_size
    assert gradient.abs().sum(1).gt(0).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": ""}, "give --target"),
        ({"draft": "target"}, "has the token ids of"),
        ({"draft": "reduced"}, "has a reduced vocabulary"),
        ({"draft": "wide"}, "in more than an embedding"),
    ],
)
def test_what_cannot_be_laid_is_refused(changes: dict[str, str], said: str, tmp_path: Path) -> None:
    """Catches a copy that is half written, and tables of the old vocabulary that are left behind."""
    settings = {"draft": "draft", "target": "target"} | changes
    saved(tmp_path / "target", PAIRS[0][1], 2)
    wide: dict[str, Any] = (
        {"arch": "gemma4_text", "num_hidden_layers": 3} if settings["draft"] == "wide" else {}
    )
    if wide:
        wide["vocab_size_per_layer_input"] = len(KINDS[PAIRS[0][0]]()) + 3
    if settings["draft"] != "target":
        saved(tmp_path / settings["draft"], PAIRS[0][0], 1, **wide)
    (tmp_path / "reduced").mkdir(exist_ok=True)
    (tmp_path / "reduced" / "draft_vocab.json").write_text('{"ids": [1, 2]}')
    target = settings["target"] and str(tmp_path / settings["target"])
    with pytest.raises(UserError, match=said) as caught:
        main(ExportConfig(str(tmp_path / settings["draft"]), "transplant", str(tmp_path / "out"), target))  # fmt: skip
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
