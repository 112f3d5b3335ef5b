"""The ids that texts have by the keys of a GGUF: by hand, by llama.cpp's algorithm, and by transformers' conversion."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer

from decode.common.errors import UserError
from decode.model.formats.gguf_tokenizers import (
    build_tokenizer,
    check_ids,
    read_vocabulary,
    reference_ids,
)
from decode.model.loading import adopt_tokenizer, load_target, load_tokenizer
from tests.gguf_writer import Case, write_case
from tests.worlds import ROOT, call

REAL = Path(os.environ.get("GEMMA_GGUF", ""))
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|user|>": 3}
WORDS = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "abc", "▁b", "bc", "▁c", "ca"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def spm(
    more: dict[str, int] | None = None, words: list[str] = WORDS, **keys: Any
) -> dict[str, Any]:
    """A SentencePiece vocabulary: special tokens, bytes, `words` in the order of their scores, and `more` of a type."""
    kinds = SPECIAL | dict.fromkeys(BYTES, 6) | dict.fromkeys(words, 1) | (more or {})
    scores = [-float(words.index(token)) if token in words else -1000.0 for token in kinds]
    return {
        "ggml.model": "llama", "ggml.tokens": list(kinds), "ggml.scores": scores,
        "ggml.token_type": list(kinds.values()), "ggml.bos_token_id": 1, "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0, **{f"ggml.{key}": value for key, value in keys.items()},
    }  # fmt: skip


def bpe(**keys: Any) -> dict[str, Any]:
    """A byte-level vocabulary of a few words; "abc" is a token that no merge makes."""
    tokens = ["<s>", "</s>", "a", "b", "c", "Ġ", "ab", "Ġab", "abc", "!"]
    return {
        "ggml.model": "gpt2", "ggml.pre": "gpt-2", "ggml.tokens": tokens,
        "ggml.merges": ["a b", "Ġ ab"], "ggml.token_type": [3, 3] + [1] * 8,
        "ggml.bos_token_id": 0, "ggml.eos_token_id": 1,
        **{f"ggml.{key}": value for key, value in keys.items()},
    }  # fmt: skip


def write(path: Path, vocabulary: dict[str, Any], **options: Any) -> str:
    return str(write_case(path / "tiny.gguf", Case(), vocabulary=vocabulary, **options))


def pieces(path: Path, vocabulary: dict[str, Any], text: str, **options: Any) -> list[str]:
    """The tokens of the text in the tokenizer that commands load."""
    tokenizer = load_tokenizer(write(path, vocabulary, **options))
    return [vocabulary["ggml.tokens"][one] for one in tokenizer(text)["input_ids"]]


@pytest.mark.parametrize(
    ("prefix", "text", "wanted"),
    [
        (True, "ab", ["<s>", "▁ab"]),
        (None, "ab", ["<s>", "▁ab"]),
        (False, "ab", ["<s>", "ab"]),
        (True, " ab", ["<s>", "▁", "▁ab"]),
        (False, " ab", ["<s>", "▁ab"]),
        (True, "a</s>b", ["<s>", "▁a", "</s>", "▁b"]),
        (False, "a</s>b", ["<s>", "a", "</s>", "b"]),
        (True, "", ["<s>"]),
        (True, "é", ["<s>", "▁", "<0xC3>", "<0xA9>"]),
    ],
)
def test_the_space_before_a_text_is_what_the_key_says(
    prefix: bool | None, text: str, wanted: list[str], tmp_path: Path
) -> None:
    """Catches add_space_prefix that is ignored, a space that is left out before another, and one before texts alone."""
    keys = {} if prefix is None else {"add_space_prefix": prefix}
    assert pieces(tmp_path, spm(**keys), text) == wanted


@pytest.mark.parametrize(
    ("spelled", "text", "wanted"),
    [
        ("  ", "ab  ab", ["<s>", "ab", "  ", "ab"]),
        ("▁▁", "ab  ab", ["<s>", "ab", "▁▁", "ab"]),
        ("  ", "ab   ab", ["<s>", "ab", "  ", "▁ab"]),
        ("  ", "ab▁▁ab", ["<s>", "ab", "▁", "▁ab"]),
        ("a b", "ca b", ["<s>", "c", "a b"]),
        ("\t\t", "a\t\t\tb", ["<s>", "a", "\t\t", "<0x09>", "b"]),
    ],
)
def test_user_defined_tokens_stand_for_what_they_spell(
    spelled: str, text: str, wanted: list[str], tmp_path: Path
) -> None:
    """Catches bare spaces that are refused, that are another token, or that only a merge finds."""
    vocabulary = spm({spelled: 4}, add_space_prefix=False)
    assert pieces(tmp_path, vocabulary, text) == wanted
    ids = [vocabulary["ggml.tokens"].index(one) for one in wanted]
    tokenizer = load_tokenizer(str(tmp_path / "tiny.gguf"))
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("▁", " ")


@pytest.mark.parametrize(
    ("vocabulary", "wanted"),
    [
        (spm(), ["<s>", "▁a"]),
        (spm(add_bos_token=False), ["▁a"]),
        (spm(add_eos_token=True), ["<s>", "▁a", "</s>"]),
        (bpe(), ["a"]),
        (bpe(add_bos_token=True, add_eos_token=True), ["<s>", "a", "</s>"]),
        (bpe(pre="llama-bpe"), ["<s>", "a"]),
        (bpe(pre="llama-bpe", add_bos_token=False), ["a"]),
    ],
)
def test_bos_and_eos_are_what_the_keys_say(
    vocabulary: dict[str, Any], wanted: list[str], tmp_path: Path
) -> None:
    """Catches add_eos_token that is ignored, and a default that is another than llama.cpp's."""
    if wanted[-1] == "a" and vocabulary["ggml.model"] == "llama":
        wanted = [*wanted[:-1], "▁a"]
    assert pieces(tmp_path, vocabulary, "a") == wanted


def test_byte_level_words(tmp_path: Path) -> None:
    """Catches a word of Llama 3 that is a token and is cut, and an end token that is a word and cuts others."""
    assert pieces(tmp_path, bpe(eos_token_id=9), "abc ab!ab") == ["ab", "c", "Ġab", "!", "ab"]
    assert pieces(tmp_path, bpe(pre="llama3"), "abc ab") == ["<s>", "abc", "Ġab"]
    vocabulary = bpe(eos_token_id=2)  # "a"
    assert pieces(tmp_path, vocabulary, "ab") == ["ab"]


def test_phi3_leaves_out_white_space_behind_control_tokens(tmp_path: Path) -> None:
    """Catches the line break of Phi-3's template, which its control tokens take away."""
    for name, wanted in (("Phi-3 Mini", ["▁a"]), ("Tiny", ["▁", "<0x0A>", "a"])):
        (tmp_path / name).mkdir()
        keys = {"general.name": name}
        found = pieces(tmp_path / name, spm(), "<|user|>\na", plain_keys=keys)
        assert found == ["<s>", "<|user|>", *wanted]


@pytest.mark.parametrize(
    ("vocabulary", "says"),
    [
        (spm(precompiled_charsmap=[1, 2]), r"key tokenizer.ggml.precompiled_charsmap = \[1, 2\]"),
        (spm(remove_extra_whitespaces=True), "key tokenizer.ggml.remove_extra_whitespaces = True"),
        (spm(escape_whitespaces=False), "key tokenizer.ggml.escape_whitespaces = False"),
        (spm() | {"ggml.normalizer.lowercase": True}, "tokenizer.ggml.normalizer.lowercase = True"),
        (spm() | {"a.new.key": 3}, "its key tokenizer.a.new.key = 3"),
        (spm(add_sep_token=True), "key tokenizer.ggml.add_sep_token = True"),
        (spm(suppress_tokens=[3]), r"key tokenizer.ggml.suppress_tokens = \[3\]"),
        (spm(model="t5"), "key tokenizer.ggml.model = t5"),
        (spm(pre="qwen2"), "key tokenizer.ggml.pre = qwen2"),
        (spm(bos_token_id=9999), "key tokenizer.ggml.bos_token_id = 9999, beyond its 272 tokens"),
        (spm(bos_token_id=262), "key tokenizer.ggml.add_bos_token = True, of the word 'b'"),
        (spm(scores=[0.0]), "key tokenizer.ggml.scores = 1 values for 272 tokens"),
        ({k: x for k, x in spm().items() if k != "ggml.scores"}, "lacks the key tokenizer.ggml.scores"),
        (spm(tokens=[*spm()["ggml.tokens"][:-1], "a"]), "its tokens 261 and 271 are both 'a'"),
        (bpe(add_space_prefix=True), "key tokenizer.ggml.add_space_prefix = True"),
        (bpe(pre="no-such"), "cuts texts as 'no-such' does"),
        ({k: x for k, x in bpe().items() if k != "ggml.merges"}, "lacks the key tokenizer.ggml.merges"),
    ],
)  # fmt: skip
def test_a_key_that_is_not_followed_is_named(
    vocabulary: dict[str, Any], says: str, tmp_path: Path, cache: Path
) -> None:
    """Catches a normaliser, or any other key, that is left out without a word."""
    with pytest.raises(UserError, match=says) as error:
        load_tokenizer(write(tmp_path, vocabulary))
    assert "\n" not in str(error.value)
    assert not [file for file in cache.rglob("*") if file.is_file()]


@pytest.mark.parametrize(
    "keys",
    [
        {"ggml.add_sep_token": False},
        {"ggml.remove_extra_whitespaces": False},
        {"ggml.escape_whitespaces": True},
        {"ggml.fim_pre_token_id": 3, "ggml.eot_token_id": 3},
        {"chat_template": "x", "chat_templates": ["rag"], "chat_template.rag": "y"},
    ],
)
def test_a_key_that_changes_nothing_does_no_harm(keys: dict[str, Any], tmp_path: Path) -> None:
    assert pieces(tmp_path, spm() | keys, "ab c") == ["<s>", "▁ab", "▁c"]


TIES = spm(words=[*WORDS, "aba", "ba"], scores=[-1000.0] * 260 + [0.0] * 14)
ORPHAN = spm(words=[*WORDS, "xyz", "xy"])
OVERLAP = spm({"<ab": 4, "b>c!": 4})


@pytest.mark.parametrize("vocabulary", [TIES, ORPHAN, OVERLAP], ids=["ties", "orphan", "overlap"])
def test_what_cannot_be_rebuilt_is_refused_with_its_tokens(
    vocabulary: dict[str, Any], tmp_path: Path
) -> None:
    """Catches vocabularies that a list of merges does not express: equal scores, tokens of characters that are none,
    and special tokens that overlap."""
    with pytest.raises(
        UserError, match="has the tokens .* by its keys has .* as rebuilt.*--tokenizer"
    ):
        load_tokenizer(write(tmp_path, vocabulary))


def test_any_vocabulary_has_llamacpps_ids_or_is_refused(tmp_path: Path) -> None:
    """Catches merges in another order, on vocabularies and texts that were drawn by chance."""
    chance, taken = random.Random(0), 0
    for round_number in range(30):
        words = list("abc▁")
        for _ in range(25):
            word = chance.choice(words) + chance.choice(words)
            words += [word] if len(word) < 6 and word not in words else []
        chance.shuffle(words)
        keys = spm(words=words, add_space_prefix=round_number % 2 == 0)
        v = read_vocabulary({f"tokenizer.{key}": value for key, value in keys.items()}, "f")
        tokenizer = build_tokenizer(v)
        try:
            check_ids(v, tokenizer, "f")
        except UserError:
            continue
        for _ in range(20):
            text = "".join(chance.choices("abc ", k=30))
            assert tokenizer.encode(text, add_special_tokens=False) == reference_ids(v, text)
        taken += 1
    assert taken >= 20


def test_merging_is_by_score_and_from_the_left(tmp_path: Path) -> None:
    """Catches a reference that merges by length, by place or by the order of ids."""
    v = read_vocabulary({f"tokenizer.{k}": x for k, x in spm(words=[*WORDS, "aa"]).items()}, "f")
    for text, wanted in (("abc", ["▁ab", "c"]), ("bca", ["▁b", "ca"]), ("aaa", ["▁a", "aa"])):
        assert [v.tokens[one] for one in reference_ids(v, text)] == wanted


def test_a_tokenizer_that_is_given_takes_the_place_of_a_refused_one(tmp_path: Path) -> None:
    """Catches a setting that is ignored, that stays in one command, or that takes any tokenizer."""
    assets = str(ROOT / "assets/target")
    path = str(write_case(tmp_path / "tiny.gguf", Case(), pre="no-such"))
    with pytest.raises(UserError, match="'no-such'.*--tokenizer"):
        load_target(path, "cpu")
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other", spm())
    with pytest.raises(
        UserError, match=r"of its 4096 tokens are others .*\(0 is '<\|endoftext\|>' and '<unk>', "
    ):
        adopt_tokenizer(path, other)
    with pytest.raises(UserError, match="is no GGUF and has its own"):
        adopt_tokenizer(assets, assets)
    adopt_tokenizer(path, assets)
    target, own = load_target(path, "cpu"), AutoTokenizer.from_pretrained(assets)
    text = "x = 12\n\n1. two  3"
    assert target.tokenizer(text).input_ids == own(text).input_ids
    adopt_tokenizer(path, assets)  # again does no harm
    whole = str(write_case(tmp_path / "whole.gguf", Case(), pre="llama-bpe"))
    load_target(whole, "cpu")
    with pytest.raises(UserError, match="was converted before, with other ids"):
        adopt_tokenizer(whole, assets)


def test_a_command_takes_a_tokenizer(tmp_path: Path) -> None:
    """Catches a command whose setting does not reach the file."""
    path = write_case(tmp_path / "tiny.gguf", Case(), pre="no-such")
    words = ("--target", path, "--prompt", "a", "--max_new_tokens", 2, "--draft", "none")
    assert "--tokenizer" in call("decode/generate.py", *words).error()
    assert call("decode/generate.py", *words, "--tokenizer", ROOT / "assets/target").ok()


@pytest.mark.skipif(not REAL.is_file(), reason="GEMMA_GGUF names no gemma-3-270m GGUF")
def test_the_real_gemma_has_the_ids_of_transformers(tmp_path: Path) -> None:
    """Catches a vocabulary of real size that differs; longer runs of spaces than any token are transformers' fault."""
    ours = load_tokenizer(str(REAL))
    theirs = AutoTokenizer.from_pretrained(REAL.parent, gguf_file=REAL.name)
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    for text in texts:
        assert ours(text[:5000]).input_ids == theirs(text[:5000]).input_ids
    assert ours(" " * 40 + "x").input_ids == [2, 167, 145, 236781]
