"""Step 4 of 4 from sources to prompts: drops overlaps with evaluation, near duplicates, and wrong lengths."""

import re
import zlib
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from decode.common.errors import UserError
from decode.common.ranges import Count, CountOrZero, zero_or
from train.data.prompts import Prompt, prompt_text

OVERLAP_WORDS = 13
"""Consecutive words in common that count as overlap, as in GPT-3 (arXiv 2005.14165, appendix C)."""
SHORT_TEXT_WORDS = OVERLAP_WORDS + 2
"""A text of this many words that is a substring of another one shares at least OVERLAP_WORDS whole words with it."""
SHINGLE_WORDS = 5
"""Words of a shingle, the unit in which near duplicates are compared."""
MINHASH_COUNT = 128
"""Hashes in the MinHash signature of a text."""
LSH_BAND_SIZE = 4
"""Neighbouring hashes that must be equal in two signatures before the signatures are compared in full."""


@dataclass
class FilterConfig:
    """Which prompts are dropped, besides those that overlap evaluation prompts."""

    min_prompt: Count = 1
    """Shortest prompt in tokens."""
    max_prompt: CountOrZero = 0
    """Longest prompt in tokens; 0: the target's context length."""
    min_answer: Count = 1
    """Fewest tokens of all replies together; rows with fewer are kept as answered, without loss spans."""
    near_duplicates: Annotated[float, zero_or(0.6, 1)] = 0.0
    """A prompt is dropped if its similarity to an earlier one, the share of 5-word shingles in common, is at least
    this: 0.6 to 1; 0 drops equal prompts only."""

    def __post_init__(self) -> None:
        if 0 < self.max_prompt < self.min_prompt:
            raise UserError(
                f"filters.min_prompt {self.min_prompt} is above filters.max_prompt {self.max_prompt}: lower it"
            )


def drop_overlaps(prompts: list[Prompt], evaluation_texts: list[str]) -> tuple[list[Prompt], int]:
    """(prompts that do not overlap the evaluation texts, number of prompts dropped).

    A prompt overlaps if it equals, contains or is a substring of an evaluation text, or has 13 consecutive words in
    common with one. White space is ignored.
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
    """(prompts that are not near duplicates of an earlier one, number of prompts dropped).

    Prompts with the same content are kept or dropped together. Similarity is the Jaccard index of the texts' 5-word
    shingles, estimated by MinHash (Broder 1997) from 128 hashes per text, to within about 0.05.
    """
    if similarity == 0:
        return prompts, 0
    is_duplicate: dict[str, bool] = {}
    signatures: list[np.ndarray] = []
    buckets: dict[bytes, list[int]] = {}
    for prompt in prompts:
        content = prompt.id.rpartition("#")[0]
        if content in is_duplicate:
            continue
        signature = minhash_signature(prompt_text(prompt))
        keys = [
            bytes([i]) + signature[i * LSH_BAND_SIZE : (i + 1) * LSH_BAND_SIZE].tobytes()
            for i in range(MINHASH_COUNT // LSH_BAND_SIZE)
        ]
        candidates = {other for key in keys for other in buckets.get(key, [])}
        is_duplicate[content] = any(
            np.mean(signatures[i] == signature) >= similarity for i in candidates
        )
        if not is_duplicate[content]:
            for key in keys:
                buckets.setdefault(key, []).append(len(signatures))
            signatures.append(signature)
    kept = [prompt for prompt in prompts if not is_duplicate[prompt.id.rpartition("#")[0]]]
    return kept, len(prompts) - len(kept)


def minhash_signature(text: str) -> np.ndarray:
    """Signature [MINHASH_COUNT] uint32; the share of equal hashes of two texts estimates their Jaccard index."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())  # punctuation counts: 1 + 1 is not 1 - 1
    shingles = {
        " ".join(words[i : i + SHINGLE_WORDS])
        for i in range(max(1, len(words) - SHINGLE_WORDS + 1))
    }
    hashed = np.array([zlib.crc32(shingle.encode()) for shingle in shingles], dtype=np.uint64)
    return ((hashed[:, None] * HASH_FACTORS + HASH_TERMS) >> np.uint64(32)).min(0).astype(np.uint32)


def has_wrong_length(prompt_tokens: int, s: FilterConfig) -> bool:
    """Whether a prompt of this many tokens is too short or too long."""
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
