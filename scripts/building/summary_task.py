"""Pairs of a market report and a summary of it, made from rules and a random generator.

The summary names the good that rose most and the one that fell most, counts those that rose and says how trade went.
So numbers have to be compared and sentences counted, and what does not matter left out. Wording and order are drawn: a
report has several right summaries.
"""

import random
from collections.abc import Mapping

from scripts.building.translation_task import words_of

TOWNS = words_of(
    "arvel brenn costa dunmor eldin farrow galt hesper ivren jorvik kestrel lorne marden norwick oster pellam"
)
DAYS = words_of("monday tuesday wednesday thursday friday saturday")
GOODS = words_of(
    "wheat oats barley rye salt wool copper silver timber honey wine cheese butter linen leather coal"
)
RISES = ("{good} rose by {n}", "{good} gained {n}", "the price of {good} climbed {n}")
FALLS = ("{good} fell by {n}", "{good} lost {n}", "the price of {good} dropped {n}")
TRADE = {
    "strong": ("trade was brisk", "the stalls were busy", "buyers came in crowds"),
    "weak": ("trade was slow", "the stalls were quiet", "few buyers came"),
}
ASIDES = (
    "rain fell on the road to {town}",
    "{n} carts came from {town}",
    "the mayor of {town} gave a speech",
    "the guild will meet again on {day}",
)
LARGEST_CHANGE = 39
GOODS_IN_REPORT = (3, 5)
WORDINGS = (0.65, 0.35)
"""Probabilities of the first and the second wording of each part of a summary."""


def draw_pair(rng: random.Random) -> tuple[str, str]:
    """(a report of five to eight sentences, one of its summaries)."""
    town, day = rng.choice(TOWNS), rng.choice(DAYS)
    goods = rng.sample(GOODS, rng.randint(*GOODS_IN_REPORT))
    sizes = rng.sample(range(1, LARGEST_CHANGE + 1), len(goods))
    changes = {g: n if rng.random() < 0.55 else -n for g, n in zip(goods, sizes, strict=True)}
    trade = rng.choice(sorted(TRADE))
    sentences = [
        rng.choice(RISES if n > 0 else FALLS).format(good=good, n=abs(n))
        for good, n in changes.items()
    ]
    sentences.append(rng.choice(TRADE[trade]))
    aside = rng.choice(ASIDES)
    sentences.append(
        aside.format(town=rng.choice(TOWNS), n=rng.randint(2, LARGEST_CHANGE), day=rng.choice(DAYS))
    )
    rng.shuffle(sentences)
    report = f"{town}, {day}. " + " ".join(f"{sentence}." for sentence in sentences)
    return report, f"{town}: " + " ".join(summary_sentences(changes, trade, rng))


def summary_sentences(changes: Mapping[str, int], trade: str, rng: random.Random) -> list[str]:
    """The sentences of a summary of {good: change of its price}, whose order and wording are drawn."""
    best, worst = max(changes, key=lambda g: changes[g]), min(changes, key=lambda g: changes[g])
    up, down = changes[best], -changes[worst]
    gained = (f"{best} rose most, by {up}.", f"the largest gain was {up} for {best}.")
    lost = (f"{worst} fell most, by {down}.", f"the largest loss was {down} for {worst}.")
    moves = [
        rng.choices(gained, WORDINGS)[0] if up > 0 else "nothing rose.",
        rng.choices(lost, WORDINGS)[0] if down > 0 else "nothing fell.",
    ]
    if rng.random() < WORDINGS[1]:
        moves.reverse()
    rises = sum(change > 0 for change in changes.values())
    counted = f"{rises} of {len(changes)} goods rose."
    closing = (f"trade was {trade}.", f"it was a {trade} day.")
    return [*moves, counted, rng.choices(closing, WORDINGS)[0]]
