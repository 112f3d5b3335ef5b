"""Step 3 of 3 from sources to tokens: finds overlaps with evaluation, near duplicates, wrong lengths, and what rows
have in common at their beginnings."""

import math
import re
import zlib
from collections.abc import Sequence

import numpy as np

from train.data.conversations import Conversation, cut_at_labels, join_turns
from train.settings.data import FilterConfig

FILTERS = ("dropped_as_evaluation", "dropped_by_length", "dropped_as_near_duplicates")
"""Names of the counts of prompts that the filters drop, in their order."""
OVERLAPS, WRONG_LENGTHS, NEAR_DUPLICATES = FILTERS
PREFIXES, REPEATED = "dropped_as_prefixes", "labels_learned_in_another_row"
"""Names of the counts of rows that others begin with, and of labels that several rows hold."""
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
BUCKET_BITS = 18
"""Bits of a bucket's number: 2^18 buckets of each band, in which 10^6 texts make lists of 4."""


class EvaluationOverlap:
    """Finds texts that overlap evaluation texts.

    A text overlaps if it equals, contains or is a substring of an evaluation text, or has 13 consecutive words in
    common with one. White space is ignored.
    """

    def __init__(self, evaluation_texts: list[str]):
        texts = [_normalize_whitespace(text) for text in evaluation_texts]
        self.joined = "\0".join(texts)
        self.short = [text for text in texts if len(text.split()) < SHORT_TEXT_WORDS]
        self.grams = {gram for text in texts for gram in _ngrams(text)}

    def overlaps(self, text: str) -> bool:
        text = _normalize_whitespace(text)
        is_within = len(text.split()) < SHORT_TEXT_WORDS and text in self.joined
        contains = any(other in text for other in self.short)
        return is_within or contains or not self.grams.isdisjoint(_ngrams(text))


class NearDuplicates:
    """Texts that resemble none before them: some 400 bytes for each.

    Similarity is the Jaccard index of the texts' 5-word shingles, estimated by MinHash (Broder 1997) from 128 hashes
    per text, to within about 0.05. The low 16 bits of the hashes are kept (b-bit MinHash, Li and König 2010). Texts are
    compared in full if all hashes of one of 32 bands are equal; for each band, texts whose band has the same hash are
    a linked list.
    """

    def __init__(self, similarity: float):
        self.similarity = similarity
        self.count = 0
        bands = MINHASH_COUNT // LSH_BAND_SIZE
        self.newest = np.zeros((bands, 1 << BUCKET_BITS), dtype=np.int32)
        """[bands, buckets] number of the last text in a bucket, 1 for the first text; 0: there is none."""
        self.earlier = np.zeros((1, bands), dtype=np.int32)
        """[texts + 1, bands] the text before this one in its bucket of each band."""
        self.signatures = np.zeros((1, bands), dtype=np.uint64)
        """[texts + 1, bands] 4 hashes of 16 bits in each number."""

    def add(self, text: str) -> bool:
        """Adds the text and returns True, or returns False if it is a near duplicate of a text that was added."""
        signature = minhash_signature(text).astype(np.uint16).view(np.uint64)
        buckets = (signature * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - BUCKET_BITS)
        bands = np.arange(len(signature))
        newest = self.newest[bands, buckets]
        if self._resembles(signature, bands, newest):
            return False
        self.count += 1
        if self.count == len(self.signatures):
            for table in (self.signatures, self.earlier):
                table.resize((self.count + self.count // 16 + 1024, len(bands)), refcheck=False)
        self.signatures[self.count], self.earlier[self.count] = signature, newest
        self.newest[bands, buckets] = self.count
        return True

    def _resembles(self, signature: np.ndarray, bands: np.ndarray, texts: np.ndarray) -> bool:
        """Whether a text in the lists that begin with `texts` [bands] resembles one with this signature."""
        hashes = signature.view(np.uint16)
        while (there := texts > 0).any():
            texts, bands = texts[there], bands[there]
            candidates = texts[self.signatures[texts, bands] == signature[bands]]
            equal = self.signatures[candidates].view(np.uint16) == hashes
            if (equal.mean(1) >= self.similarity).any():
                return True
            texts = self.earlier[texts, bands]
        return False


def minhash_signature(text: str) -> np.ndarray:
    """Signature [MINHASH_COUNT] uint32; the share of equal hashes of two texts estimates their Jaccard index."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())  # punctuation counts: 1 + 1 is not 1 - 1
    starts = range(max(1, len(words) - SHINGLE_WORDS + 1))
    shingles = {" ".join(words[i : i + SHINGLE_WORDS]).encode() for i in starts}
    hashed = np.array([zlib.crc32(shingle) for shingle in shingles], dtype=np.uint64)
    return ((hashed[:, None] * HASH_FACTORS + HASH_TERMS) >> np.uint64(32)).min(0).astype(np.uint32)


class PromptFilter:
    """Which prompts are dropped, and why."""

    def __init__(self, s: FilterConfig, evaluation_texts: list[str]):
        self.s = s
        self.evaluation = EvaluationOverlap(evaluation_texts)
        self.unlike = NearDuplicates(s.near_duplicates) if s.near_duplicates > 0 else None

    def why_dropped(self, text: str, tokens: int | None) -> str:
        """The name of the count of the first filter that a prompt does not pass; "" if it passes all. `tokens` is its
        length, None where any will do."""
        if self.evaluation.overlaps(text):
            return OVERLAPS
        longest = self.s.max_prompt or math.inf
        if tokens is not None and not self.s.min_prompt <= tokens <= longest:
            return WRONG_LENGTHS
        return NEAR_DUPLICATES if self.unlike is not None and not self.unlike.add(text) else ""


def learn_once(
    conversations: Sequence[Conversation],
) -> tuple[list[tuple[Conversation, int] | None], dict[str, int], int]:
    """(of each conversation what is left of it, and how many tokens of another one it begins with if that has labels of
    its; None for one that another begins with; {name: count}; tokens of those that are left out).

    Every token that is a label behind the same tokens in any of them is a label in exactly one of those that are left.
    They are taken in falling order of their ids: each comes right behind what it has most in common with, and the
    beginning of a conversation behind the whole.
    """
    keys = [_ids_and_labels(one)[0].tobytes() for one in conversations]
    own: dict[int, tuple[np.ndarray, int]] = {}
    before, taken = np.empty(0, dtype=">i4"), np.empty(0, dtype=bool)
    last = unread = repeated = 0
    for i in sorted(range(len(keys)), key=keys.__getitem__, reverse=True):
        ids, labels = _ids_and_labels(conversations[i])
        length = min(len(before), len(ids))
        shared = int(np.append(before[:length] != ids[:length], True).argmax())
        new = labels.copy()
        new[:shared] &= ~taken[:shared]
        repeated += int(labels.sum() - new.sum())
        taken[:shared] |= labels[:shared]
        if own and shared == len(ids):
            own[last][0][:shared] |= new
            unread += shared
        else:
            own[i], before, last = (new, shared), ids, i
            taken = np.concatenate([taken[:shared], labels[shared:]])
    left: list[tuple[Conversation, int] | None] = [None] * len(keys)
    for i, (new, shared) in own.items():
        ids, labels = _ids_and_labels(conversations[i])
        same = np.array_equal(new, labels)
        whole = conversations[i] if same else cut_at_labels(ids.tolist(), new.tolist())
        left[i] = whole, 0 if same else shared
    counts = {PREFIXES: len(keys) - len(own), REPEATED: repeated}
    return left, {name: number for name, number in counts.items() if number}, unread


def _ids_and_labels(one: Conversation) -> tuple[np.ndarray, np.ndarray]:
    """([T] token ids, whose bytes sort as they do; [T] bool, the labels)."""
    ids, spans = join_turns(one.prompt_segments, one.replies)
    labels = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        labels[start:end] = True
    return np.array(ids, dtype=">i4"), labels


def _normalize_whitespace(text: str) -> str:
    return " ".join(text.split())


def _ngrams(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + OVERLAP_WORDS]) for i in range(len(words) - OVERLAP_WORDS + 1)}


HASH_TERMS, HASH_FACTORS = (
    np.random.default_rng(seed).integers(1, 2**63, MINHASH_COUNT, dtype=np.uint64)
    for seed in (2, 1)
)
HASH_FACTORS = HASH_FACTORS * np.uint64(2) + np.uint64(1)  # odd
