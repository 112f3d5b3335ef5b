"""Pairs of an English text and its translation into an invented language, made from rules and a random generator.

What makes it more than a dictionary: the verb stands last and agrees with a subject far before it; articles, adjectives
and pronouns agree with a noun's gender, which has to be learnt for each noun; objects have articles of their own; two
nouns become one compound whose middle depends on the head's gender; six nouns have two readings, which the verb
decides; `with` has two. Some words have two stems, adverbs two places, and particles may stand or not: those are drawn,
so a text has several right translations and a model that has learnt the rules still samples different ones.
"""

import itertools
import random
from dataclasses import dataclass


def words_of(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = words_of(
    "farmer teacher doctor sailor singer soldier painter baker hunter child stranger neighbour king widow "
    "horse dog wolf bird goat bear fox hen cat donkey "
    "house bridge river road field forest garden tower market harbour mountain valley church mill station island "
    "table letter lamp knife basket boat wagon coat mirror hammer rope bell key window door bottle candle drum "
    "stone iron apple bread cloud star"
)
LIVING = NOUNS[:24]
HOMONYMS = ("bank", "seal", "crane", "spring", "trunk", "bat")
"""Nouns with two readings: the first beside a verb of the first half of VERBS, the second beside the others."""
VERBS = words_of(
    "follow watch visit call fear help greet pass cross reach hunt guard "
    "lift paint clean pull push mend want count touch burn join cook"
)
ADJECTIVES = words_of(
    "old young red green tall small dark quiet strange broken clever heavy empty golden cold wet proud poor "
    "gentle famous narrow wild clean bitter"
)
ADVERBS = words_of("slowly often never gladly secretly again together early")
PREPOSITIONS = words_of("in near behind under with")
NUMERALS = ("two", "three", "four", "five")
ENGLISH_TENSES = ("past", "present", "future")

DEFINITE = ("ve", "so", "na")
INDEFINITE = ("um", "os", "ir")
NOUN_PLURALS = ("li", "ro", "tha")
ADJECTIVE_ENDINGS = (("a", "o", "e"), ("am", "om", "em"))
VERB_ENDINGS = (("t", "k", "s"), ("nta", "nko", "nse"))
TENSE_PREFIXES = {"past": "e", "present": "", "future": "vo"}
PRONOUNS = (("il", "ul", "al"), ("ilim", "ulum", "alem"))
COMPOUND_LINKS = ("u", "is", "er")
"""Endings and words by the gender of a noun, 0 to 2; of pairs the first is the singular's."""
OBJECT_MARK = "n"
WITH_ANIMATE, WITH_OTHERS = "sel", "dum"
COPULA, PARTICLE = "esta", "ya"

SECOND_STEM, ADVERB_FIRST, PARTICLE_SAID, COPULA_SAID = 0.3, 0.3, 0.25, 0.6
"""Probabilities of what a translator is free to choose."""


@dataclass(frozen=True)
class Lexeme:
    """A word of the invented language: its stem, a second one if there are two to choose from, and a noun's gender."""

    stem: str
    second: str
    gender: int

    def draw(self, rng: random.Random) -> str:
        return self.second if self.second and rng.random() < SECOND_STEM else self.stem


@dataclass(frozen=True)
class NounPhrase:
    noun: str
    plural: bool
    article: str
    """`the`, `a` or a numeral."""
    adjective: str = ""
    modifier: str = ""
    """The noun before it in a compound: `stone` of `stone bridge`."""

    def english(self) -> str:
        words = [self.article, self.adjective, self.modifier, self.noun + "s" * self.plural]
        if self.article == "a" and next(w for w in words[1:] if w)[0] in "aeiou":
            words[0] = "an"
        return " ".join(word for word in words if word)


def build_dictionary() -> dict[str, Lexeme]:
    """{English word, `bank/0` and `bank/1` for readings: lexeme}, the same in every run; every fifth has two stems."""
    rng = random.Random("dictionary")
    onsets = words_of("p t k b d g m n l r s f v z sh br tr kl")
    syllables = [a + b for a, b in itertools.product(onsets, "aeiou")]
    codas = ("", *"nlrsm")
    taken: set[str] = set()

    def new_stem() -> str:
        while True:
            stem = rng.choice(syllables) + rng.choice(syllables) + rng.choice(codas)
            if stem not in taken:
                taken.add(stem)
                return stem

    readings = [f"{noun}/{i}" for noun in HOMONYMS for i in (0, 1)]
    words = [*NOUNS, *readings, *VERBS, *(f"{x}/adjective" for x in ADJECTIVES), *ADVERBS]
    words += [*PREPOSITIONS, *NUMERALS]
    free = set(rng.sample(words[: -len(PREPOSITIONS) - len(NUMERALS)], len(words) // 5))
    return {
        word: Lexeme(new_stem(), new_stem() if word in free else "", rng.randrange(3))
        for word in words
    }


DICTIONARY = build_dictionary()


def noun_lexeme(noun: str, verb: str) -> Lexeme:
    """The noun's lexeme; that of a homonym is the reading which the clause's verb decides."""
    if noun not in HOMONYMS:
        return DICTIONARY[noun]
    return DICTIONARY[f"{noun}/{int(VERBS.index(verb) >= len(VERBS) // 2)}"]


def draw_noun_phrase(rng: random.Random, pool: tuple[str, ...]) -> NounPhrase:
    noun, plural = rng.choice(pool), rng.random() < 0.4
    article = "the" if rng.random() < 0.6 else rng.choice(NUMERALS) if plural else "a"
    adjective = rng.choice(ADJECTIVES) if rng.random() < 0.5 else ""
    modifier = rng.choice(("stone", "iron", "river", "forest")) if rng.random() < 0.2 else ""
    return NounPhrase(noun, plural, article, adjective, modifier)


def render_noun_phrase(
    phrase: NounPhrase, verb: str, rng: random.Random, is_object: bool = False
) -> str:
    """Article or numeral, noun with its modifier, adjective; the article of an object is marked."""
    lexeme = noun_lexeme(phrase.noun, verb)
    g = lexeme.gender
    if phrase.article in NUMERALS:
        article = DICTIONARY[phrase.article].stem
    else:
        article = (DEFINITE if phrase.article == "the" else INDEFINITE)[g] + "i" * phrase.plural
    noun = lexeme.draw(rng) + NOUN_PLURALS[g] * phrase.plural
    if phrase.modifier:
        noun = DICTIONARY[phrase.modifier].stem + COMPOUND_LINKS[g] + noun
    words = [article + OBJECT_MARK * is_object, noun]
    if phrase.adjective:
        stem = DICTIONARY[f"{phrase.adjective}/adjective"].draw(rng)
        words.append(stem + ADJECTIVE_ENDINGS[phrase.plural][g])
    return " ".join(words)


def render_place(preposition: str, phrase: NounPhrase, verb: str, rng: random.Random) -> str:
    """The noun phrase, then the postposition, of which `with` has one for the living and one for things."""
    if preposition == "with":
        post = WITH_ANIMATE if phrase.noun in LIVING else WITH_OTHERS
    else:
        post = DICTIONARY[preposition].stem
    return f"{render_noun_phrase(phrase, verb, rng)} {post}"


def english_verb(verb: str, tense: str, plural: bool) -> str:
    if tense == "past":
        return verb + "ed"
    if tense == "future":
        return f"will {verb}"
    return verb if plural else verb + ("es" if verb.endswith(("ch", "ss", "sh")) else "s")


def draw_pair(rng: random.Random) -> tuple[str, str]:
    """(an English text of one or two sentences, one of its translations)."""
    verb, tense = rng.choice(VERBS), rng.choice(ENGLISH_TENSES)
    subject = draw_noun_phrase(rng, (*LIVING, *HOMONYMS))
    thing = draw_noun_phrase(rng, (*NOUNS, *HOMONYMS))
    beside_subject = rng.random() < 0.3
    place = draw_noun_phrase(rng, NOUNS) if rng.random() < 0.6 else None
    preposition = rng.choice(PREPOSITIONS)
    adverb = rng.choice(ADVERBS) if rng.random() < 0.5 else ""

    g, n = noun_lexeme(subject.noun, verb).gender, subject.plural
    at = f" {preposition} {place.english()}" if place else ""
    english = subject.english() + at * beside_subject + f" {english_verb(verb, tense, n)} "
    english += thing.english() + at * (not beside_subject) + (f" {adverb}" if adverb else "") + "."

    words = [render_noun_phrase(subject, verb, rng)]
    where = [render_place(preposition, place, verb, rng)] if place else []
    seen = render_noun_phrase(thing, verb, rng, is_object=True)
    words += [*where, seen] if beside_subject else [seen, *where]
    if adverb:
        how = DICTIONARY[adverb].draw(rng)
        words.insert(0 if rng.random() < ADVERB_FIRST else len(words), how)
    words.append(TENSE_PREFIXES[tense] + DICTIONARY[verb].draw(rng) + VERB_ENDINGS[n][g])
    if rng.random() < PARTICLE_SAID:
        words.append(PARTICLE)
    invented = " ".join(words) + "."

    if rng.random() < 0.4:  # a pronoun that takes the subject's gender from the sentence before
        quality = rng.choice(ADJECTIVES)
        english += f" {'they were' if n else 'it was'} {quality}."
        stem = DICTIONARY[f"{quality}/adjective"].draw(rng)
        copula = f" {COPULA}" if rng.random() < COPULA_SAID else ""
        invented += f" {PRONOUNS[n][g]} {stem}{ADJECTIVE_ENDINGS[n][g]}{copula}."
    return english, invented
