"""The doctor says where a lookup may do, by the rounds that the engine's own n-gram would take."""

from pathlib import Path

import pytest
import yaml

from decode.drafts.lookup import NgramDraft
from decode.engine.engine import speculate
from decode.engine.records import collect_outputs
from eval.settings.evaluation import EvalConfig, TuneConfig
from tests.tiny import tiny_model, tiny_prompts, tiny_target
from tests.train.doctor_checks.sets import END, clean_rows, examine, graves, save_set, save_target
from tests.worlds import ROOT
from train.doctor_checks.lookup import DRAFT_LENGTH, ROWS, rounds_of

NAME = "answers copy their prompts"


@pytest.mark.parametrize("seed", range(4))
def test_rounds_are_those_of_the_engine(seed: int) -> None:
    """Catches another law than the draft's: a bonus token left out, an end that counts twice, other matches."""
    target = tiny_target(tiny_model("llama", seed=seed, vocab_size=12, num_hidden_layers=1))
    prompts = tiny_prompts(9, 30, 17, vocab=12)
    rounds = speculate(target, NgramDraft(), prompts, k=DRAFT_LENGTH, max_new_tokens=60)
    records = collect_outputs(prompts, rounds)
    for prompt, record in zip(prompts, records, strict=True):
        ids = [*prompt, *record.output_ids]
        assert rounds_of(ids, len(prompt) + 1, NgramDraft()) == len(record.rounds)


def test_long_answers_are_looked_up_in_parts() -> None:
    """Catches places behind the first part that look at the wrong text."""
    ids = [5, 6, 7, 8, 9] * 80
    assert len(ids) > 2 * ROWS
    assert rounds_of(ids, 5, NgramDraft()) == 1 + -(
        -394 // 5
    )  # one without a match, then five tokens each
    assert rounds_of(list(range(400)), 1, NgramDraft()) == 399


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ("the whole prompt", True),
        ("half of the prompt, then words of its own", False),
        ("itself, again and again", True),
        ("words of its own", False),
        ("the earlier turn", True),
    ],
)
def test_answers_that_copy_are_said(answers: str, found: bool, tmp_path: Path) -> None:
    """Catches a set that needs no trained draft and is not said to, and one that needs it and is."""
    tokenizer = save_target(tmp_path / "t")
    rows = clean_rows(tokenizer)
    for row in rows:
        ids, (start, end) = list(row["input_ids"]), row["loss_spans"][-1]
        own, asked = ids[start : end - 1], ids[: row["loss_spans"][0][0]]
        said = {
            "the whole prompt": asked,
            "half of the prompt, then words of its own": asked[: len(asked) // 8] + own,
            "itself, again and again": own[:12] * 12,
            "words of its own": own,
            "the earlier turn": ids[:start] if len(row["loss_spans"]) > 1 else asked,
        }[answers]
        said = [x for x in said if x > 11]  # no special tokens
        row["input_ids"] = [*ids[:start], *said, END]
        row["loss_spans"][-1] = [start, start + len(said) + 1]
    result = examine(tmp_path / "t", save_set(tmp_path / "s", tokenizer, rows))
    assert (NAME in result["found"]) == found
    (part,) = result["parts"].values()
    tau = float(part["facts"]["τ of an n-gram, K = 4"].split()[0])
    assert (tau >= 1.95) == found
    if found:
        cost = f"answers copy their prompts (n-gram τ {tau:.2f}): a lookup may do"
        assert result["found"][NAME]["cost"] == cost
        assert result["found"][NAME]["severity"] == "note"


def test_a_clean_set_has_no_grave_finding_of_it(tmp_path: Path) -> None:
    """Catches a lookup's τ that ends a training."""
    tokenizer = save_target(tmp_path / "t")
    assert (
        graves(examine(tmp_path / "t", save_set(tmp_path / "s", tokenizer, clean_rows(tokenizer))))
        == []
    )


def test_an_ngram_stands_in_every_default_evaluation() -> None:
    """Catches a table in which a trained draft has no lookup beside it."""
    for config in (EvalConfig, TuneConfig):
        (default,) = (x for x in config.__dataclass_fields__.values() if x.name == "methods")
        assert [m.name for m in default.default_factory()] == ["ngram"]
    files = sorted(ROOT.glob("configs/*/*eval*.yaml"))
    assert len(files) >= 6
    for file in files:
        methods = yaml.safe_load(file.read_text())["methods"]
        assert "ngram" in [m["name"] for m in methods], file
