"""What is left out of the prompts: near-duplicates and wrong lengths. Overlap with evaluation is in test_prompts.py."""

import random

import numpy as np
import pytest

from train.data.filters import (
    LSH_BAND_SIZE,
    MINHASH_COUNT,
    WRONG_LENGTHS,
    EvaluationOverlap,
    NearDuplicates,
    PromptFilter,
    minhash_signature,
)
from train.settings.data import FilterConfig

WORDS = [f"w{i}" for i in range(500)]


def kept(texts: list[str], similarity: float) -> list[str]:
    """The texts that are no near duplicates of earlier ones."""
    unlike = NearDuplicates(similarity)
    return [text for text in texts if unlike.add(text)]


def text(seed: int, count: int = 100) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def changed(original: str, times: int) -> str:
    """Another word at so many places, far from each other."""
    words = original.split()
    for i in range(times):
        words[(i * 97 + 3) % len(words)] = f"new{i}"
    return " ".join(words)


def runs(one: str) -> set[str]:
    words = one.split()
    return {" ".join(words[i : i + 5]) for i in range(len(words) - 4)}


@pytest.mark.parametrize("times", [0, 1, 2, 5, 20])
def test_signatures_estimate_the_share_of_runs_in_common(times: int) -> None:
    """Bug: a hash that is not uniform, or one shared by all 128 places, and the estimate is worth nothing."""
    errors = []
    for seed in range(20):
        one = text(seed)
        other = changed(one, times)
        true = len(runs(one) & runs(other)) / len(runs(one) | runs(other))
        errors.append(np.mean(minhash_signature(one) == minhash_signature(other)) - true)
    assert np.abs(errors).max() < 0.17  # four standard errors of 128 coin tosses
    assert abs(np.mean(errors)) < 0.03


def test_the_first_of_what_resembles_each_other_stays() -> None:
    """Bug: resemblance hangs on spelling, the wrong one is dropped, or different texts are."""
    one, other = text(1), text(2)
    again = one.upper().replace(" ", " \n ")
    given = [one, other, changed(one, 1), again, changed(other, 40)]
    assert kept(given, 0.8) == [given[0], given[1], given[4]]


def test_most_near_duplicates_are_found() -> None:
    """Bug: candidates are looked for in too few places, so that near-duplicates are missed by the score."""
    ones = [text(seed) for seed in range(300)]
    twins = [changed(one, 2) for one in ones]  # 0.82 in common
    assert kept([*ones, *twins], 0.6) == ones


def kept_by_dict(texts: list[str], similarity: float) -> list[str]:
    """The texts that stay by the plain algorithm: whole hashes, and a dict from bands to texts."""
    signatures: list[np.ndarray] = []
    buckets: dict[bytes, list[int]] = {}
    found = []
    for one in texts:
        signature = minhash_signature(one)
        keys = [
            bytes([i]) + signature[i * LSH_BAND_SIZE : (i + 1) * LSH_BAND_SIZE].tobytes()
            for i in range(MINHASH_COUNT // LSH_BAND_SIZE)
        ]
        candidates = {other for key in keys for other in buckets.get(key, [])}
        if not any(np.mean(signatures[i] == signature) >= similarity for i in candidates):
            for key in keys:
                buckets.setdefault(key, []).append(len(signatures))
            signatures.append(signature)
            found.append(one)
    return found


@pytest.mark.parametrize("similarity", [0.6, 0.8, 1.0])
def test_compact_tables_decide_as_a_dict_does(
    similarity: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: lists of buckets that many texts share lose a text, tables that grow forget one, or a text is compared with
    one that was dropped: chains of texts, each like the one before it, show that."""
    monkeypatch.setattr("train.data.filters.BUCKET_BITS", 8)  # 12 texts in a bucket
    rng = random.Random(0)
    texts = [text(seed, rng.randint(1, 120)) for seed in range(1500)]
    for seed in range(300):
        chain = [text(seed, 100)]
        for _ in range(5):
            chain.append(chain[-1].replace(rng.choice(chain[-1].split()), f"new{rng.random()}", 1))
        texts += chain
    rng.shuffle(texts)
    found = kept(texts, similarity)
    assert found == kept_by_dict(texts, similarity)
    assert len(texts) - len(found) > (0 if similarity == 1.0 else 300)


@pytest.mark.parametrize("short", ["a", "", "==", "two words", "1 - 1"])
def test_short_texts_are_compared_whole(short: str) -> None:
    """Bug: a text with fewer than five words has no run, and everything or a crash comes of it."""
    given = [short, "something else", f"{short} and more", short + " ", "1 + 1"]
    assert kept(given, 0.9) == [*given[:3], given[4]]


def test_long_evaluation_texts_are_found_by_their_words() -> None:
    """Bug: comparing every prompt with every evaluation text takes hours, or its short cut misses some."""
    asked = text(1, 40)
    inside = " ".join(asked.split()[7:30])
    for training in (asked, f"x{asked}x", f"before {asked} after", inside, f"oo{inside}bar"):
        assert EvaluationOverlap([asked]).overlaps(training)
    assert not EvaluationOverlap([asked]).overlaps(text(2))
    assert EvaluationOverlap(["o two words b"]).overlaps("what is oo two words bar?")


def test_lengths() -> None:
    """Bug: a bound is off by one, or 0 drops everything."""
    some = PromptFilter(FilterConfig(min_prompt=3, max_prompt=5), [])
    wrong = [some.why_dropped("zq", n) == WRONG_LENGTHS for n in range(2, 7)]
    assert wrong == [True, False, False, False, True]
    assert PromptFilter(FilterConfig(), []).why_dropped("zq", 10**9) == ""
    assert some.why_dropped("zq", None) == ""  # a window of a text
