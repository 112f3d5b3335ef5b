"""The tasks made from rules, and the command that trains T5s on them."""

import json
import os
import random
import re
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, T5ForConditionalGeneration

from scripts.building import build_seq2seq, summary_task, translation_task
from scripts.building.translation_task import DICTIONARY, NounPhrase, render_noun_phrase
from tests import worlds
from tests.test_stopped_commands import on_call
from tests.worlds import Done

TINY = [
    "--steps",
    3,
    "--batch_size",
    2,
    "--train_prompts",
    3,
    "--eval_prompts",
    2,
    "--save_every",
    2,
]


# ---- the invented language ----


def noun_of(gender: int) -> str:
    """A noun of the gender with one stem only."""
    return next(
        n for n in translation_task.NOUNS
        if DICTIONARY[n].gender == gender and not DICTIONARY[n].second
    )  # fmt: skip


def test_all_parts_of_a_phrase_agree_with_its_noun() -> None:
    """Catches an ending of another gender or number, and an object without its mark."""
    rng = random.Random(0)
    adjective = next(
        a for a in translation_task.ADJECTIVES if not DICTIONARY[f"{a}/adjective"].second
    )
    how = DICTIONARY[f"{adjective}/adjective"].stem
    found = []
    for gender in range(3):
        noun = noun_of(gender)
        for plural in (False, True):
            phrase = NounPhrase(noun, plural, "the", adjective)
            text = render_noun_phrase(phrase, "follow", rng, is_object=plural)
            found.append(text.replace(DICTIONARY[noun].stem, "N").replace(how, "A"))
    assert found == [
        "ve N Aa",
        "vein Nli Aam",
        "so N Ao",
        "soin Nro Aom",
        "na N Ae",
        "nain Ntha Aem",
    ]
    compound = NounPhrase(noun_of(1), False, "a", modifier="iron")
    iron, head = DICTIONARY["iron"].stem, DICTIONARY[noun_of(1)].stem
    assert render_noun_phrase(compound, "follow", rng) == f"os {iron}is{head}"


def test_the_verb_decides_between_two_readings() -> None:
    """Catches a homonym that is translated without its context."""
    first, second = translation_task.VERBS[0], translation_task.VERBS[-1]
    for noun in translation_task.HOMONYMS:
        readings = [translation_task.noun_lexeme(noun, verb) for verb in (first, second)]
        assert readings == [DICTIONARY[f"{noun}/0"], DICTIONARY[f"{noun}/1"]]
        assert readings[0].stem != readings[1].stem


def test_the_verb_stands_last_and_agrees_with_the_subject() -> None:
    """Catches a verb in English order, or agreement with another noun. Subjects are read from the English text."""
    rng, checked = random.Random(1), 0
    places = "|".join(translation_task.PREPOSITIONS)
    before = rf"\w+(?: (?!(?:{places}) )\w+)*?"
    subject = re.compile(rf"{before} ({'|'.join(translation_task.LIVING)})(s?) (?:will )?(\w+)")
    for _ in range(400):
        english, invented = translation_task.draw_pair(rng)
        match = subject.match(english)
        verb = match and next((v for v in translation_task.VERBS if match[3].startswith(v)), None)
        if not match or not verb:
            continue  # a homonym, or a place beside the subject
        words = invented.split(".")[0].removesuffix(f" {translation_task.PARTICLE}").split()
        ending = translation_task.VERB_ENDINGS[match[2] == "s"][DICTIONARY[match[1]].gender]
        stems = [s for s in (DICTIONARY[verb].stem, DICTIONARY[verb].second) if s]
        assert re.fullmatch(rf"(e|vo|)({'|'.join(stems)}){ending}", words[-1]), (english, invented)
        checked += 1
    assert checked > 100


# ---- summaries ----


def test_summaries_say_what_their_reports_say() -> None:
    """Catches a wrong extreme, count or mood: the numbers are read from the report's text."""
    rng = random.Random(2)
    for _ in range(300):
        report, summary = summary_task.draw_pair(rng)
        ups = dict(re.findall(r"(\w+) (?:rose by|gained|climbed) (\d+)", report))
        downs = dict(re.findall(r"(\w+) (?:fell by|lost|dropped) (\d+)", report))
        assert f"{len(ups)} of {len(ups) + len(downs)} goods rose." in summary
        for moves, verb, size, none in (
            (ups, "rose", "gain", "rose"),
            (downs, "fell", "loss", "fell"),
        ):
            if moves:
                good = max(moves, key=lambda g: int(moves[g]))
                said = (
                    f"{good} {verb} most, by {moves[good]}.",
                    f"largest {size} was {moves[good]} for {good}.",
                )
                assert any(text in summary for text in said), (report, summary)
            else:
                assert f"nothing {none}." in summary
        busy = any(text in report for text in summary_task.TRADE["strong"])
        assert ("strong" in summary, "weak" in summary) == (busy, not busy)


def test_a_report_has_several_right_summaries() -> None:
    """Catches answers without any entropy: then sampling at T = 1 is greedy decoding."""
    rng = random.Random(3)
    drawn = {
        " ".join(summary_task.summary_sentences({"oats": 5, "salt": -7}, "weak", rng))
        for _ in range(400)
    }
    assert len(drawn) == 2 * 2 * 2 * 2


# ---- the command ----


def test_pairs_are_a_function_of_their_key_and_avoid_what_is_held_out() -> None:
    """Catches batches that a resumed run would not get again, and evaluation prompts that are trained on."""
    for task in build_seq2seq.TASKS:
        pairs = build_seq2seq.draw_pairs(task, "0/7", 20)
        assert pairs == build_seq2seq.draw_pairs(task, "0/7", 20)
        assert pairs != build_seq2seq.draw_pairs(task, "0/8", 20)
        held_out = frozenset(source for source, _ in pairs[::2])
        kept = build_seq2seq.draw_pairs(task, "0/7", 20, held_out)
        assert kept[:10] == pairs[1::2]
        assert held_out.isdisjoint(source for source, _ in kept)


def test_padding_changes_no_loss() -> None:
    """Catches padding that is attended to or counted: the loss of a batch is that of its pairs, token by token."""
    tokenizer = build_seq2seq.build_tokenizer(400)
    torch.manual_seed(0)
    model = build_seq2seq.new_model("small", tokenizer).eval()
    pairs = [
        ("translate: the dog", "ve"),
        ("summarise: oats rose by 12. oats fell by 3.", "nothing rose. it was."),
    ]
    together = build_seq2seq.evaluate(model, tokenizer, pairs, "cpu")
    alone = [build_seq2seq.evaluate(model, tokenizer, [pair], "cpu") for pair in pairs]
    assert together["tokens"] == sum(x["tokens"] for x in alone)
    total = sum(x["loss"] * x["tokens"] for x in alone)
    assert together["loss"] == pytest.approx(total / together["tokens"], abs=2e-4)
    with torch.no_grad():
        loss = model(**build_seq2seq.encode_batch(tokenizer, pairs, "cpu")).loss
    assert together["loss"] == pytest.approx(loss.item(), abs=2e-4)


def test_a_stopped_run_ends_with_the_same_models(tmp_path: Path) -> None:
    """Catches steps that are lost or repeated, and folders that transformers loads as another model."""

    def build(name: str) -> Done:
        return worlds.call("scripts/building/build_seq2seq.py", *TINY, "--out", tmp_path / name)

    whole = build("whole")
    assert whole.code == 0, whole.err
    with pytest.MonkeyPatch.context() as patch:
        stop = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
        on_call(
            patch, torch.nn.utils, "clip_grad_norm_", 5, stop
        )  # the second step of the second model
        done = build("stopped")
    assert done.code == 128 + signal.SIGTERM
    assert "step 2 is saved" in done.err
    done = build("stopped")
    assert done.code == 0, done.err
    assert "base: resumed at step 2 of 3" in done.out
    for size in build_seq2seq.SIZES:
        files = [tmp_path / name / size / "model.safetensors" for name in ("whole", "stopped")]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert list(tmp_path.rglob("*.pt")) == []

    facts = json.loads(whole.out.splitlines()[-1])["models"]
    assert [x["model"] for x in facts] == list(build_seq2seq.SIZES)
    sizes = [x["parameters"] for x in facts]
    assert sizes == sorted(sizes)
    folder = tmp_path / "whole"
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    lines = (folder / "prompts" / "summary" / "eval.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    row = rows[0]
    ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
    assert ids[0, -1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == row["prompt"]
    model = T5ForConditionalGeneration.from_pretrained(folder / "small")
    pairs = [(row["prompt"], row["reference"]) for row in rows]
    assert build_seq2seq.evaluate(model, tokenizer, pairs, "cpu") == facts[0]["held_out"]["summary"]
    out = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert out[0, 0] == model.config.decoder_start_token_id == tokenizer.pad_token_id
