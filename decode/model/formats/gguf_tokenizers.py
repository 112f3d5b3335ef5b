"""The tokenizer of a GGUF: the ids that llama.cpp gives to texts by the keys of the file.

As with the architecture's keys, every `tokenizer.` key is followed, or changes no id, or the file is refused with its
name. What was built is compared with `reference_ids`, llama.cpp's algorithm written out, on texts that include tokens
of the vocabulary: the tokenizers library merges by one list, and cannot express every vocabulary.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, pairwise
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from decode.common.errors import UserError
from decode.model.vocabularies import PROBE

ORIGINAL = (
    "give the folder or Hub name of the model's own tokenizer once (--tokenizer of decode/generate.py, eval/run.py, "
    "train/sample.py or train/distill.py), or take the model's original folder"
)
WITHOUT_EFFECT = frozenset(
    f"tokenizer.{key}"
    for key in (
        "chat_template", "chat_templates", "ggml.token_type_count", "ggml.eot_token_id", "ggml.eom_token_id",
        "ggml.seperator_token_id", "ggml.cls_token_id", "ggml.mask_token_id", "ggml.prefix_token_id",
        "ggml.suffix_token_id", "ggml.middle_token_id",
        *(f"ggml.fim_{part}_token_id" for part in ("pre", "suf", "mid", "pad", "rep", "sep")),
    )
)  # fmt: skip
"""Keys that name tokens or templates, and change no id of a text; so do those of named chat templates."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
SPACE = "▁"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(digits: str) -> Any:
    """Splits words, up to three or single digits, signs and spaces, as Llama 3 and Qwen 2 do."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(f"{_WORDS}|{digits}|{_REST}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _words() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
"""Names of Llama 3's way: BOS unless the file says otherwise, and a word that is a token is not merged."""
PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), _words),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell"),
        lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _words()]),
    ),
    **dict.fromkeys(LLAMA3, lambda: _split(r"\p{N}{1,3}")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), lambda: _split(r"\p{N}")),
}
"""How byte-level vocabularies cut a text before merging, by the name that GGUF gives it (tokenizer.ggml.pre)."""


@dataclass(frozen=True)
class Vocabulary:
    """What the keys of a GGUF say of its tokenizer."""

    tokens: list[str]
    ids: dict[str, int]
    types: list[int]
    scores: list[float]
    """Of a SentencePiece vocabulary: pairs are merged into the token of the highest score first."""
    merges: dict[tuple[str, str], int]
    """{pair: rank} of a byte-level vocabulary."""
    pre: str
    """How a byte-level vocabulary cuts texts; "": a SentencePiece one, which does not."""
    space_prefix: bool
    """Whether a text begins with a space, and so does what follows a special token."""
    added: dict[str, int | None]
    """{bos, eos: the id that is put before or behind a text}; None: none is."""
    roles: dict[str, int]
    """{bos, eos, unk, pad: id}"""
    strip: bool
    """Whether white space behind control tokens is left out, as Phi-3's are written."""

    @cached_property
    def special(self) -> dict[str, int]:
        """{token: type} of those that are found in a text before it is cut, the longest first."""
        kinds = (UNKNOWN, CONTROL, USER_DEFINED)
        held = [(t, k) for t, k in zip(self.tokens, self.types, strict=True) if k in kinds]
        return dict(sorted(held, key=lambda one: -len(one[0].encode())))

    def stripped(self, token: str) -> bool:
        return self.strip and token not in ("<unk>", "<s>", "<|endoftext|>")


def read_vocabulary(keys: dict[str, Any], file: str) -> Vocabulary:
    """The tokenizer that the keys describe. UserError that names a key that is missing or not followed."""
    left = {key: value for key, value in keys.items() if key.startswith("tokenizer.")}

    def refuse(key: str, value: Any) -> UserError:
        return UserError(
            f"{file}: its key tokenizer.ggml.{key} = {str(value)[:60]} is not followed here: {ORIGINAL}"
        )

    def take(key: str, default: Any = None) -> Any:
        return left.pop(f"tokenizer.ggml.{key}", default)

    def need(key: str) -> Any:
        if f"tokenizer.ggml.{key}" not in left:
            raise UserError(f"{file} lacks the key tokenizer.ggml.{key}: get the whole file again")
        return take(key)

    model, pre = need("model"), take("pre", "")
    if model not in ("gpt2", "llama"):
        raise refuse("model", model)
    spm = model == "llama"
    if spm and pre not in ("", "default"):
        raise refuse("pre", pre)
    if not spm and pre not in PRE_TOKENIZERS:
        raise UserError(
            f"{file} cuts texts as {pre!r} does (tokenizer.ggml.pre), which is not one of "
            f"{', '.join(sorted(PRE_TOKENIZERS))}: {ORIGINAL}"
        )
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(need("tokens"))]
    types = take("token_type", [NORMAL] * len(tokens))
    for number in [n for n, kind in enumerate(types) if kind == USER_DEFINED and n < len(tokens)]:
        if not tokens[number].strip(SPACE):  # so files of before July 2024 spell spaces
            tokens[number] = " " * len(tokens[number])
    ids = {token: number for number, token in enumerate(tokens)}
    twice = [n for n, token in enumerate(tokens) if ids[token] != n]
    if twice:
        token = tokens[twice[0]]
        raise UserError(
            f"{file}: its tokens {twice[0]} and {ids[token]} are both {token!r}: {ORIGINAL}"
        )
    scores = need("scores") if spm else take("scores", [])
    for key, values in (("token_type", types), ("scores", scores if spm else tokens)):
        if len(values) != len(tokens):
            raise refuse(key, f"{len(values)} values for {len(tokens)} tokens")
    merges = take("merges", []) if spm else need("merges")
    roles = {role: take(f"{key}_token_id") for role, key in ROLES.items()}
    if spm:  # llama.cpp's defaults
        roles = {role: DEFAULT_IDS.get(role) if n is None else n for role, n in roles.items()}
    held = {role: number for role, number in roles.items() if number is not None}
    for role, number in held.items():
        if number >= len(tokens):
            raise refuse(f"{ROLES[role]}_token_id", f"{number}, beyond its {len(tokens)} tokens,")
    added = {}
    for role, usual in (("bos", spm or pre in LLAMA3), ("eos", False)):
        said = take(f"add_{role}_token", usual)
        if said and role not in held:
            raise refuse(f"add_{role}_token", f"{said}, without tokenizer.ggml.{role}_token_id,")
        if said and types[held[role]] == NORMAL:  # transformers would cut texts at it
            raise refuse(f"add_{role}_token", f"{said}, of the word {tokens[held[role]]!r},")
        added[role] = held[role] if said else None
    space_prefix = take("add_space_prefix", spm)
    if space_prefix and not spm:
        raise refuse("add_space_prefix", space_prefix)
    neutral = {"escape_whitespaces": spm, "merges": []}
    for key, value in left.items():
        name = key.removeprefix("tokenizer.ggml.")
        harmless = key in WITHOUT_EFFECT or key.startswith("tokenizer.chat_template.")
        if not harmless and value != neutral.get(name, False):
            raise UserError(f"{refuse(name, value)}".replace(f"tokenizer.ggml.{name}", key))
    if spm and merges:
        raise refuse("merges", f"{len(merges)} pairs, beside scores,")
    ranks: dict[tuple[str, str], int] = {}
    for rank, merge in enumerate(merges):
        cut = merge.find(" ", 1)
        ranks.setdefault((merge[:cut], merge[cut + 1 :]), rank)
    phi3 = any(name in str(keys.get("general.name", "")).lower() for name in ("phi-3", "phi3"))
    return Vocabulary(
        tokens, ids, types, scores, ranks, pre if not spm else "", space_prefix, added, held, phi3
    )


ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
DEFAULT_IDS = {"bos": 1, "eos": 2, "unk": 0}


def build_tokenizer(vocabulary: Vocabulary) -> Any:
    """The tokenizer of transformers that gives the vocabulary's ids, without a chat template."""
    v = vocabulary
    if v.pre:
        backend = Tokenizer(models.BPE(v.ids, list(v.merges), ignore_merges=v.pre in LLAMA3))
        backend.pre_tokenizer = PRE_TOKENIZERS[v.pre]()
        backend.decoder = decoders.ByteLevel()
    else:
        unknown = v.tokens[v.roles["unk"]]
        merges = list(_score_merges(v))
        backend = Tokenizer(
            models.BPE(v.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        prefix = [normalizers.Prepend(SPACE)] if v.space_prefix else []
        stripped = [decoders.Strip(content=" ", left=1)] if v.space_prefix else []
        parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
        backend.decoder = decoders.Sequence([*parts, *stripped])
    backend.add_tokens(
        [
            AddedToken(
                token, special=kind != USER_DEFINED, normalized=False, rstrip=v.stripped(token)
            )
            for token, kind in v.special.items()
        ]
    )
    put = {f"{role}": (v.tokens[n], n) for role, n in v.added.items() if n is not None}
    if put:
        begin, end = ([put[role][0]] if role in put else [] for role in ("bos", "eos"))
        backend.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end], pair=[*begin, "$A", *end, *begin, "$B:1", *end],
            special_tokens=list(put.values()),
        )  # fmt: skip
    # A word would no longer be cut and merged as others are if it became a special token.
    roles = {
        f"{role}_token": v.tokens[number]
        for role, number in v.roles.items()
        if v.types[number] != NORMAL
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **roles)


def _score_merges(v: Vocabulary) -> Iterator[tuple[str, str]]:
    """All pairs of tokens that are one together, those of the highest score first."""
    for number in sorted(range(len(v.tokens)), key=lambda one: -v.scores[one]):
        token = v.tokens[number]
        for cut in range(1, len(token)):
            if token[:cut] in v.ids and token[cut:] in v.ids:
                yield token[:cut], token[cut:]


def reference_ids(v: Vocabulary, text: str) -> list[int]:
    """The ids of a text by llama.cpp's algorithm, without those that are put before and behind it."""
    out: list[int] = []
    for part, special in _parts(v, text):
        if special:
            out.append(v.ids[part])
        elif v.pre:
            for word, _ in PRE_TOKENIZERS[v.pre]().pre_tokenize_str(part):
                whole = v.pre in LLAMA3 and word in v.ids
                symbols = (
                    [word] if whole else _merged(list(word), lambda a, b: v.merges.get((a, b)))
                )
                out += [v.ids[s] for s in symbols if s in v.ids]
        else:
            part = (" " * v.space_prefix + part).replace(" ", SPACE)
            for symbol in _merged(list(part), lambda a, b: _score_rank(v, a + b)):
                out += _piece_ids(v, symbol, out)
    return out


def _score_rank(v: Vocabulary, token: str) -> float | None:
    return -v.scores[v.ids[token]] if token in v.ids else None


def _piece_ids(v: Vocabulary, symbol: str, before: list[int]) -> list[int]:
    """The ids of a symbol that nothing was merged with; one unknown token for several that have no bytes."""
    if symbol in v.ids:
        return [v.ids[symbol]]
    named = [f"<0x{byte:02X}>" for byte in symbol.encode()]
    if all(one in v.ids for one in named):
        return [v.ids[one] for one in named]
    return [] if before[-1:] == [v.roles["unk"]] else [v.roles["unk"]]


def _merged(symbols: list[str], rank: Callable[[str, str], float | None]) -> list[str]:
    """The symbols after merging: again and again the neighbours of the lowest rank, of equal ones the leftmost."""
    while True:
        ranks = [rank(first, second) for first, second in pairwise(symbols)]
        best = min((one for one in ranks if one is not None), default=None)
        if best is None:
            return symbols
        at = ranks.index(best)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def _parts(v: Vocabulary, text: str) -> list[tuple[str, bool]]:
    """The text cut at its special tokens, (part, whether it is one); the longest tokens are looked for first."""
    parts = [(text, False)] if text else []
    for token in v.special:
        if token not in text:
            continue
        cut: list[tuple[str, bool]] = []
        for part, special in parts:
            if special or token not in part:
                cut.append((part, special))
                continue
            left, *rest = part.split(token)
            cut += [(left, False)] if left else []
            for right in rest:
                right = right.lstrip(" \t\n\v\f\r") if v.stripped(token) else right
                cut += [(token, True), *([(right, False)] if right else [])]
        parts = cut
    return parts


def check_tokens(keys: dict[str, Any], tokenizer: Any, file: str) -> None:
    """UserError that names tokens of the file which a tokenizer that is to take the place of its own does not have.

    Tokens that fill the vocabulary up may be called anything.
    """
    tokens = keys.get("tokenizer.ggml.tokens", [])
    types = keys.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokens))))
    wrong = [
        f"{number} is {token!r} and {name!r}"
        for number, (token, kind, name) in enumerate(zip(tokens, types, names, strict=True))
        if not (kind == UNUSED or (name is None and token.startswith("[PAD")))
        and str(name).replace(SPACE, " ") != token.replace(SPACE, " ")
    ]
    if wrong or not tokens:
        raise UserError(
            f"{file}: {len(wrong)} of its {len(tokens)} tokens are others in the tokenizer that is given for it "
            f"({', '.join(wrong[:4])}): give that of the same model"
        )


LANGUAGES = (
    " The café's  naïve déjà-vu, isn't it? 12,345.67 €",
    "Größenwahn über Straßen\n\n\n\tund zurück",
    "Привет, как дела? Съешь ещё этих булок",
    "今日はいい天気ですね。東京へ行きましょう 一二三",
    "안녕하세요 만나서 반갑습니다",
    "مرحبا بالعالم كيف حالك",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "👩‍💻 x² ≠ ∑ 𝔹 ￼\u200b\u00a0end   ",
)


def check_ids(v: Vocabulary, tokenizer: Any, file: str) -> None:
    """UserError that names a text and its tokens for which the tokenizer gives other ids than the file's keys."""
    for text in (PROBE, *LANGUAGES, *_token_texts(v)):
        wanted, found = reference_ids(v, text), tokenizer.encode(text, add_special_tokens=False)
        if wanted != found:
            names = [[v.tokens[one] for one in ids] for ids in (wanted, found)]
            same = next(
                (n for n, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b),
                min(len(wanted), len(found)),
            )
            first, second = (" ".join(map(repr, one[same : same + 4])) for one in names)
            raise UserError(
                f"{file}: a text that has the tokens {first} by its keys has {second} as rebuilt here: {ORIGINAL}"
            )


def _token_texts(v: Vocabulary, count: int = 60, most: int = 300) -> Iterator[str]:
    """Texts of words that follow each other by chance, always the same ones, and of tokens that overlap where
    algorithms may differ: special ones, and ones of equal scores."""
    chance = random.Random(1)
    decode = decoders.ByteLevel().decode if v.pre else "".join
    plain = [t for t, kind in zip(v.tokens, v.types, strict=True) if kind == NORMAL] or v.tokens
    special = list(v.special)
    for _ in range(count):
        words = decode(chance.choices(plain, k=8)).replace(SPACE, " ")
        ends = chance.choices(special, k=2) if special else []
        yield words.join(ends) if ends else words
    yield from islice(_overlapping(special), most)
    equal: dict[float, list[str]] = {}
    for token in [] if v.pre else plain:
        equal.setdefault(v.scores[v.ids[token]], []).append(token.replace(SPACE, " "))
    for tokens in equal.values():
        if len(tokens) > 1:
            yield from islice(_overlapping(tokens), most)


def _overlapping(tokens: Iterable[str]) -> Iterator[str]:
    """Texts in which one of the tokens begins within another one, but for those of one character."""
    starts: dict[str, list[str]] = {}
    for token in tokens:
        starts.setdefault(token[0], []).append(token)
    for first in chain.from_iterable(starts.values()):
        for cut in range(1, len(first)):
            for second in starts.get(first[cut], []):
                text = first[:cut] + second
                if second.startswith(first[cut:]) and len(text) > len(first) > text.count(text[0]):
                    yield text
