"""Nothing that a draft is measured on is in what it is trained on, and there is enough of both."""

import re

import pytest

from train.data import python_corpus
from train.data.conversations import prompt_text
from train.data.filters import EvaluationOverlap
from train.data.sources import BUNDLED_PROMPTS, DOMAINS, evaluation_texts, read_prompts
from train.settings.data import PromptSource

TRAINING, EVALUATION = 150, 40  # prompts a domain, at least


def texts(split: str, domain: str) -> list[str]:
    """The bundled prompts of one file, read without the code that decontaminates."""
    source = PromptSource("file", str(BUNDLED_PROMPTS / split / f"{domain}.jsonl"))
    return [prompt.text or "" for prompt in read_prompts([source], seed=0)]


@pytest.mark.parametrize("domain", DOMAINS)
def test_there_are_enough_prompts(domain: str) -> None:
    """Bug: a file lost lines, or repeats itself (repeated prompts are loaded once)."""
    assert len(texts("train", domain)) >= TRAINING
    assert len(texts("eval", domain)) >= EVALUATION


def test_bundled_training_prompts_lose_none_to_decontamination() -> None:
    """Bug: training prompts that overlap with evaluation are dropped silently at every run."""
    prompts = read_prompts([PromptSource("bundled", "all")], seed=0)
    assert len(prompts) >= TRAINING * len(DOMAINS)
    evaluation = EvaluationOverlap(evaluation_texts())
    assert not any(evaluation.overlaps(prompt_text(prompt)) for prompt in prompts)


def test_no_training_prompt_begins_like_an_evaluation_prompt() -> None:
    """Bug: a prompt was copied over and its end changed, or its numbers, so that few words in a row are equal."""

    def beginnings(split: str) -> set[str]:
        found = {text for domain in DOMAINS for text in texts(split, domain)}
        return {" ".join(re.findall(r"[a-z]+", text.lower())[:8]) for text in found}

    assert beginnings("train") & beginnings("eval") == set()


def test_stdlib_cuts_hold_nothing_of_held_out_modules() -> None:
    """Bug: text that the target was never trained on, for evaluation's sake, comes back as a prompt."""
    secret = "\n".join(python_corpus.read_modules(True).values())
    cuts = read_prompts([PromptSource("stdlib", limit=200)], seed=0)
    assert len(cuts) == 200
    assert [cut.text for cut in cuts if (cut.text or "") in secret] == []


def test_every_held_out_module_is_found() -> None:
    """Bug: a module that is misspelt in the list is not held out at all."""
    optional = {
        name for name in python_corpus.HELD_OUT_MODULES if name.startswith(("tkinter", "sqlite3"))
    }
    held_out = set(python_corpus.read_modules(True))
    assert (
        python_corpus.HELD_OUT_MODULES - optional <= held_out
    )  # some systems package these two apart
    assert held_out & set(python_corpus.read_modules(False)) == set()
