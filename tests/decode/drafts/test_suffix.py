"""The suffix draft: counts and guesses equal the slow definition; rows and corpus are kept apart."""

import math
import time
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.common.errors import UserError
from decode.drafts.base import DraftContext
from decode.drafts.lookup import SuffixDraft
from decode.drafts.suffix_tree import SuffixMatch, SuffixTree
from decode.engine.engine import decode
from decode.verification.rules import NO_DRAFT
from decode.verification.sampling import SamplingParams
from tests.tiny import tiny_model, tiny_prompts, tiny_target

LETTERS = 3
Text = list[int]
texts_of = st.lists(st.lists(st.integers(0, LETTERS - 1), max_size=16), min_size=1, max_size=4)
depths = st.integers(2, 5)


def occurrences(texts: list[Text], depth: int) -> Counter[tuple[int, ...]]:
    """How often each string of up to that length stands in the texts; the empty one before every token."""
    return Counter(
        tuple(text[start : start + n])
        for text in texts
        for start in range(len(text))
        for n in range(min(depth, len(text) - start) + 1)
    )


def strings(depth: int) -> Iterator[Text]:
    """Every string over the alphabet up to that length."""
    for n in range(depth + 1):
        yield from map(list, product(range(LETTERS), repeat=n))


def assert_counts(tree: SuffixTree, texts: list[Text]) -> None:
    times = occurrences(texts, tree.depth)
    for string in strings(tree.depth):
        assert tree.count(string) == times[tuple(string)], string


def built(depth: int, texts: list[Text]) -> SuffixTree:
    tree = SuffixTree(depth)
    for key, text in enumerate(texts):
        tree.extend(key, text)
    return tree


def nodes(tree: SuffixTree) -> int:
    """Nodes below the root, which are what takes memory."""
    open_nodes, seen = [tree._root], -1
    while open_nodes:
        node = open_nodes.pop()
        seen += 1
        below = [node.child, *(node.others or {}).values()]
        open_nodes += [child for child in below if not isinstance(child, int)]
    return seen


# ---- counts ----


@given(texts_of, depths, st.data())
def test_growing_in_any_steps_counts_the_same(
    texts: list[Text], depth: int, data: st.DataObject
) -> None:
    """Catches ends of a text that are lost or stale when texts grow piece by piece and in turns."""
    tree, written = SuffixTree(depth), [0] * len(texts)
    while any(n < len(text) for n, text in zip(written, texts, strict=True)):
        key = data.draw(st.sampled_from([k for k, t in enumerate(texts) if written[k] < len(t)]))
        step = data.draw(st.integers(1, 4))
        tree.extend(key, texts[key][written[key] : written[key] + step])
        written[key] += step
        assert_counts(tree, [text[:n] for text, n in zip(texts, written, strict=True)])
    for key, text in enumerate(texts):
        assert text == [] or tree.text(key) == text


@given(texts_of, depths, st.data())
def test_removal_leaves_the_others_as_if_alone(
    texts: list[Text], depth: int, data: st.DataObject
) -> None:
    """Catches counts left behind, strings of living texts lost, and a most frequent child that no longer is."""
    tree, alive = built(depth, texts), dict(enumerate(texts))
    while alive:
        key = data.draw(st.sampled_from(sorted(alive)))
        tree.remove(key)
        del alive[key]
        assert_counts(tree, list(alive.values()))
        fresh = built(depth, list(alive.values()))
        for pattern, shape in product(
            [[*string, 0] for string in strings(2)] + texts, (False, True)
        ):
            guesses = [x.speculate(pattern, 4, 1.0, 1.0, 0.0, shape) for x in (tree, fresh)]
            assert guesses[0] == guesses[1]
        if alive:  # what stays goes on growing
            key = data.draw(st.sampled_from(sorted(alive)))
            alive[key] = [*alive[key], 1, 0]
            tree.extend(key, [1, 0])
            assert_counts(tree, list(alive.values()))
    assert nodes(tree) == 0


def test_memory_goes_with_what_repeats() -> None:
    """Catches a node for every string of every text: 24 a token, kilobytes in Python."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 50_000, (3000,), generator=generator).tolist()
    tree = built(24, [text])
    assert nodes(tree) < 300
    tree.extend("again", text)
    assert nodes(tree) <= 3000 * 24
    tree.remove("again")
    tree.remove(0)
    assert nodes(tree) == 0


# ---- guesses ----


def slow_guess(
    texts: list[Text], depth: int, pattern: Text, max_tokens: int, factor: float, offset: float, least: float,
    tree: bool,
) -> SuffixMatch:  # fmt: skip
    """The rule as it is written, by counting strings; probabilities multiplied in the same order."""
    times = occurrences(texts, depth)
    best = SuffixMatch([], [], [], 0.0, 0)
    for length in range(1, min(len(pattern), depth)):
        match = pattern[len(pattern) - length :]
        if times[tuple(match)] == 0:
            break
        room = min(max_tokens, math.floor(length * factor + offset + 1e-6))
        taken: list[tuple[Text, int, float]] = []  # string, parent, probability
        frontier = [(match, 1.0, 0)]
        candidates: list[tuple[float, int, int, Text]] = []
        while len(taken) < room:
            for string, probability, number in frontier:
                below = [(-times[*string, token], token) for token in range(LETTERS)]
                found = sorted(entry for entry in below if entry[0] < 0)
                for negative, token in found if tree else found[:1]:
                    chance = probability * (-negative / times[tuple(string)])
                    if chance >= least:
                        candidates.append((-chance, number, token, [*string, token]))
            if not candidates:
                break
            candidates.sort()
            chance, parent, _, string = candidates.pop(0)
            taken.append((string, parent, -chance))
            frontier = [(string, -chance, len(taken))]
        probabilities = [probability for _, _, probability in taken]
        if taken and sum(probabilities) >= best.score:
            tokens = [string[-1] for string, _, _ in taken]
            parents = [parent for _, parent, _ in taken]
            best = SuffixMatch(tokens, parents, probabilities, sum(probabilities), length)
    return best


@settings(max_examples=300)
@given(
    texts_of,
    depths,
    st.lists(st.integers(0, LETTERS - 1), max_size=7),
    st.tuples(
        st.integers(0, 7),
        st.sampled_from([0.0, 0.29, 0.5, 1.0, 2.0]),
        st.sampled_from([-1.0, 0.0, 0.5, 1.0, 3.0]),
        st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]),
        st.booleans(),
    ),
)
def test_guess_equals_the_slow_rule(
    texts: list[Text], depth: int, pattern: Text, rule: Any
) -> None:
    """Catches wrong ties, a cap or threshold off by one, a score that a longer match should have lost to."""
    assert built(depth, texts).speculate(pattern, *rule) == slow_guess(texts, depth, pattern, *rule)


@given(texts_of, depths, st.booleans())
def test_the_end_of_a_text_equals_the_slow_rule(texts: list[Text], depth: int, tree: bool) -> None:
    """Catches a text's own end taken for a continuation: this is how the draft asks, after every round."""
    pattern = texts[0]
    guess = built(depth, texts).speculate(pattern, 4, 1.0, 1.0, 0.1, tree)
    assert guess == slow_guess(texts, depth, pattern, 4, 1.0, 1.0, 0.1, tree)


def test_hand_counted_guess() -> None:
    """Catches the oracle above sharing the code's mistake: figures worked out by hand."""
    tree = built(8, [[1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 1, 2]])
    chain = tree.speculate([7, 1, 2], 4, factor=2.0)  # behind "1 2": 3 twice, 4 once, the end once
    assert chain.tokens == [3, 8, 1, 2]  # of 8 and 9, once each, the lower
    assert chain.parents == [0, 1, 2, 3]
    assert chain.probabilities == [0.5, 0.25, 0.25, 0.25]
    assert (chain.score, chain.match_length) == (1.25, 2)
    branches = tree.speculate([7, 1, 2], 4, factor=2.0, tree=True)
    assert branches.tokens == [3, 4, 8, 9]
    assert branches.parents == [0, 0, 1, 1]
    assert branches.probabilities == [0.5, 0.25, 0.25, 0.25]
    for least, want in ((0.25, [3, 4, 8, 9]), (0.26, [3])):
        assert tree.speculate([7, 1, 2], 4, 2.0, 0.0, least, tree=True).tokens == want


def test_the_cap_is_not_rounded_away() -> None:
    """Catches a token lost to floats: 3 * 0.6 + 0.2 is 1.9999999999999998 in them."""
    assert built(8, [[1, 2, 3, 4, 5, 6]]).speculate([9, 1, 2, 3], 8, 0.6, 0.2).tokens == [4, 5]


def test_speed() -> None:
    """Catches work that grows with the text: seconds here instead of the 0.2 s it takes on a slow core."""
    generator = torch.Generator().manual_seed(0)
    words = [torch.randint(0, 200, (9,), generator=generator).tolist() for _ in range(100)]
    order = torch.randint(0, 100, (1112,), generator=generator).tolist()
    text = [token for word in order for token in words[word]][:10_000]
    start = time.process_time()
    tree = built(24, [text])
    for i in range(1000):
        tree.speculate(text[i * 9 : i * 9 + 30], 16, tree=bool(i % 2))
    assert time.process_time() - start < 4


# ---- the draft ----


def seated(draft: SuffixDraft, prompts: list[Text]) -> SuffixDraft:
    """The draft as the engine leaves it before the first round, but for the first tokens."""
    draft.begin_batch(
        DraftContext(len(prompts), 99, 8, SamplingParams(), lambda weights: weights.argmax(-1))
    )
    admitted(draft, dict(enumerate(prompts)))
    return draft


def admitted(draft: SuffixDraft, prompts: dict[int, Text]) -> None:
    width = max(map(len, prompts.values()))
    table = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts.values()])
    length = torch.tensor([len(prompt) for prompt in prompts.values()])
    draft.prefill(torch.tensor(list(prompts)), table, length, None)
    for row, prompt in prompts.items():
        draft.on_commit(row, prompt)


def proposed(draft: SuffixDraft, rows: int, k: int) -> list[Text]:
    """The chains without their padding."""
    proposal = draft.propose(torch.zeros(rows, 99, dtype=torch.long), torch.zeros(rows), k)
    assert proposal.q is None
    assert proposal.tokens.shape == (rows, k)
    assert proposal.tokens.dtype == torch.long
    chains = [[token for token in row if token != NO_DRAFT] for row in proposal.tokens.tolist()]
    for chain, row in zip(chains, proposal.tokens.tolist(), strict=True):
        assert row == chain + [NO_DRAFT] * (k - len(chain))
    return chains


PHRASE = [11, 12, 13, 14, 15, 16, 17, 18]


def test_rows_know_only_themselves() -> None:
    """Catches one tree for all rows, tokens observed in another row, and ids missed between rounds."""
    draft = seated(SuffixDraft(), [[*PHRASE, 1], [2, 3, 4]])
    draft.on_commit(0, [11])
    draft.on_commit(1, [11])
    assert proposed(draft, 2, 4) == [[12], []]
    draft.on_commit(0, [12, 13])
    draft.on_commit(1, [12, 13])
    assert proposed(draft, 2, 4) == [[14, 15, 16], []]
    assert proposed(draft, 2, 2) == [[14, 15], []]


def test_propose_reads_no_tensor() -> None:
    """Catches a device read in every round: a tensor without values cannot be read."""
    draft = seated(SuffixDraft(), [[*PHRASE, 11, 12]])
    empty = torch.empty(1, 99, dtype=torch.long, device="meta")
    proposal = draft.propose(empty, empty[:, 0], 4)
    assert proposal.tokens.device.type == "meta"
    assert proposal.tokens.shape == (1, 4)


def test_outputs_are_learned_prompts_are_not() -> None:
    """Catches prompts that fill the corpus, outputs that never reach it, and rows that keep an earlier text."""
    prompt = [5, 6, 7]
    draft = seated(SuffixDraft(learn=True), [prompt, [1]])
    draft.on_commit(0, PHRASE)
    assert proposed(draft, 2, 4) == [[], []]
    admitted(draft, {0: [3, 11, 12, 13]})  # refilled while row 1 goes on
    draft.on_commit(1, [2, 11, 12])
    assert proposed(draft, 2, 4) == [[14, 15, 16], [13, 14]]
    admitted(draft, {0: prompt[:2]})
    assert proposed(draft, 2, 4)[0] == []
    seated(draft, [[11, 12, 13], [9, 2]])  # a next batch learns what row 1 had emitted, too
    assert draft._corpus.count([2, 11, 12]) == 1
    assert proposed(draft, 2, 4)[1] == [11]
    fresh = seated(SuffixDraft(learn=False), [prompt])
    fresh.on_commit(0, PHRASE)
    assert proposed(seated(fresh, [[3, 11, 12, 13]]), 1, 4) == [[]]


def test_the_corpus_must_promise_strictly_more() -> None:
    """Catches the corpus winning ties: the request's own text is the better witness."""
    own = [*PHRASE[:4], 21, 22, 11, 12, 13]  # 14 follows at 1/2, then 21: scores 1.5 of length 3
    for corpus, want in (
        ([[11, 12, 13, 91, 92, 93], [11, 12, 13, 1, 1, 1]], [14, 21, 22]),  # 0.5 each: a tie
        ([[11, 12, 13, 91, 92, 93]], [91, 92, 93]),  # certain
    ):
        draft = seated(SuffixDraft(corpus=corpus), [own])
        assert proposed(draft, 1, 3) == [want]


def test_the_oldest_outputs_are_evicted() -> None:
    """Catches a corpus that grows without end, the newest thrown away, and an overlong output that empties it."""
    draft = SuffixDraft(learn=True, corpus=[[1, 2, 3], [4, 5], [6, 7, 8]], max_corpus_tokens=6)
    assert [draft._corpus.count([token]) for token in (1, 4, 6)] == [0, 1, 1]
    draft._add_to_corpus(list(range(20, 30)))
    assert draft._corpus.count([]) == 6
    assert draft._corpus.count([24, 25, 26, 27, 28, 29]) == 1


def test_tree_proposals() -> None:
    """Catches trees without the second choice, and parents that do not count from the last committed token."""
    draft = seated(SuffixDraft(factor=2.0, nodes=3), [[1, 2, 3, 1, 2, 4, 1, 2], [1]])
    length = torch.tensor([8, 1])
    proposal = draft.propose(torch.zeros(2, 16, dtype=torch.long), length, 3)
    assert proposal.tokens.tolist() == [[3, 4, 1], [NO_DRAFT] * 3]
    assert proposal.tree is not None
    assert proposal.tree.parents.tolist() == [[0, 0, 1], [0, 0, 0]]


# ---- in the engine ----


@pytest.mark.parametrize(("rows", "nodes"), [(None, 8), (2, 0)])
def test_decoding_is_lossless_and_learns(rows: int | None, nodes: int) -> None:
    """Catches rows and texts out of step with the engine's: the second time, every answer is known."""
    model = tiny_model("llama")
    prompts = tiny_prompts(13, 4, 9)
    plain = decode(tiny_target(model), None, prompts, max_new_tokens=24)
    draft = SuffixDraft(learn=True, factor=4.0, min_probability=0.0, nodes=nodes)
    for _ in range(2):
        outputs = decode(tiny_target(model), draft, prompts, k=6, max_new_tokens=24, rows=rows)
        assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
    rounds = [len(output.rounds) for output in outputs]
    assert max(rounds) <= 12, rounds  # 23 without drafts


def test_a_tree_needs_depth() -> None:
    """Catches a setting with which nothing can ever be drafted."""
    with pytest.raises(UserError, match="depth >= 2, got 1"):
        SuffixDraft(depth=1)
