"""Which prompts are left out: what evaluation asks too, what was nearly there before, what is too long or too short."""

import re
import zlib
from dataclasses import dataclass

import numpy as np

from decode.common.errors import UserError
from train.data.prompts import Prompt, prompt_text

OVERLAP_WORDS = (
    13  # words in common that count as overlap, as in GPT-3 (arXiv 2005.14165, appendix C)
)
SHORT_TEXT_WORDS = (
    OVERLAP_WORDS + 2
)  # a text of so many words cannot lie within another without whole words in common

SHINGLE_WORDS = 5  # words that near-duplicates are compared by
MINHASH_COUNT, LSH_BAND_SIZE = (
    128,
    4,
)  # numbers that stand for a text; so many of them must agree to look closer


@dataclass
class FilterConfig:
    """What is left out, besides what evaluation asks too."""

    min_prompt: int = 1
    """Tokens that a prompt has at least."""
    max_prompt: int = 0
    """Tokens that a prompt has at most; 0: what the target's context holds."""
    min_answer: int = 1
    """Tokens of the replies in all; rows with fewer are kept as answered, with nothing to learn."""
    near_duplicates: float = 0.0
    """Similarity to an earlier prompt, the share of 5-word runs in common, from which one is left out: 0.6 to 1; 0
    leaves out equal ones only."""

    def __post_init__(self) -> None:
        if min(self.min_prompt, self.min_answer) < 1 or self.max_prompt < 0:
            raise UserError("filters: need min_prompt and min_answer >= 1, max_prompt >= 0")
        if self.near_duplicates != 0 and not 0.6 <= self.near_duplicates <= 1:
            raise UserError(f"filters.near_duplicates {self.near_duplicates}: give 0, or 0.6 to 1")


def drop_overlaps(prompts: list[Prompt], evaluation_texts: list[str]) -> tuple[list[Prompt], int]:
    """(prompts that share nothing with the evaluation texts, number of prompts dropped).

    Dropped is what equals, contains or lies within an evaluation text, or has 13 words in a row in
    common with one. Only words count: a change of white space hides nothing.
    """
    texts = [_normalize_whitespace(text) for text in evaluation_texts]
    joined = "\0".join(texts)
    short = [text for text in texts if len(text.split()) < SHORT_TEXT_WORDS]
    grams = {gram for text in texts for gram in _ngrams(text)}

    def overlaps(prompt: Prompt) -> bool:
        text = _normalize_whitespace(prompt_text(prompt))
        if not grams.isdisjoint(_ngrams(text)):
            return True
        within = len(text.split()) < SHORT_TEXT_WORDS and text in joined
        return within or any(other in text for other in short)

    kept = [prompt for prompt in prompts if not overlaps(prompt)]
    return kept, len(prompts) - len(kept)


def drop_near_duplicates(prompts: list[Prompt], similarity: float) -> tuple[list[Prompt], int]:
    """(prompts none of which resembles an earlier one of them, number of prompts dropped).

    Samples of one content go together. Resemblance is the share of 5-word runs that two texts have in common (Jaccard),
    estimated by MinHash (Broder 1997): from 128 numbers a text, to within 0.05 or so.
    """
    if similarity == 0:
        return prompts, 0
    resembles: dict[str, bool] = {}
    signatures: list[np.ndarray] = []
    buckets: dict[bytes, list[int]] = {}
    for prompt in prompts:
        content = prompt.id.rpartition("#")[0]
        if content in resembles:
            continue
        own = minhash_signature(prompt_text(prompt))
        keys = [
            bytes([i]) + own[i * LSH_BAND_SIZE : (i + 1) * LSH_BAND_SIZE].tobytes()
            for i in range(MINHASH_COUNT // LSH_BAND_SIZE)
        ]
        near = {other for key in keys for other in buckets.get(key, [])}
        resembles[content] = any(np.mean(signatures[i] == own) >= similarity for i in near)
        if not resembles[content]:
            for key in keys:
                buckets.setdefault(key, []).append(len(signatures))
            signatures.append(own)
    kept = [prompt for prompt in prompts if not resembles[prompt.id.rpartition("#")[0]]]
    return kept, len(prompts) - len(kept)


def minhash_signature(text: str) -> np.ndarray:
    """[HASHES] uint32: two texts agree in about the share of places that is the share of 5-word runs in common."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())  # signs count: 1 + 1 is not 1 - 1
    runs = {
        " ".join(words[i : i + SHINGLE_WORDS])
        for i in range(max(1, len(words) - SHINGLE_WORDS + 1))
    }
    hashed = np.array([zlib.crc32(run.encode()) for run in runs], dtype=np.uint64)
    return ((hashed[:, None] * HASH_FACTORS + HASH_TERMS) >> np.uint64(32)).min(0).astype(np.uint32)


def has_wrong_length(prompt_tokens: int, s: FilterConfig) -> bool:
    """Whether a prompt of so many tokens is left out."""
    return prompt_tokens < s.min_prompt or 0 < s.max_prompt < prompt_tokens


def _normalize_whitespace(text: str) -> str:
    return " ".join(text.split())


def _ngrams(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + OVERLAP_WORDS]) for i in range(len(words) - OVERLAP_WORDS + 1)}


def _hash_coefficients(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 2**63, MINHASH_COUNT, dtype=np.uint64)


HASH_FACTORS, HASH_TERMS = (
    _hash_coefficients(1) * np.uint64(2) + np.uint64(1),
    _hash_coefficients(2),
)
