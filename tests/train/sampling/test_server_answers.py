"""Which tokens a server's answer consists of: known, provably known, or refused."""

from typing import Any

import pytest

from decode.model.loading import load_tokenizer, tokenizer_fingerprint
from decode.serving.running.completions import ForeignReplyError, MalformedReplyError
from tests import worlds
from train.data.prompt_pipeline import TargetTokenizer
from train.sampling.server_engine import UnusableReplyError, read_reply

PROMPT, LIMIT = [20, 21, 22], 8


@pytest.fixture(scope="module")
def reader() -> TargetTokenizer:
    """The bundled target's, whose pieces have several letters; it has one EOS token."""
    name = str(worlds.ROOT / "assets" / "target")
    tokenizer = load_tokenizer(name, None)
    eos = frozenset({tokenizer.eos_token_id})
    return TargetTokenizer(name, None, tokenizer, tokenizer_fingerprint(tokenizer), 512, eos)


def choice(text: str, finish: str = "length", **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish, **more}]}


def in_pieces(reader: TargetTokenizer, text: str) -> tuple[list[int], list[int]]:
    """(the tokenizer's own ids of `text`, as many other ids that decode to it)."""
    own = reader.tokenizer(text)["input_ids"]
    for cut in range(1, len(text)):
        ids = [
            token
            for part in (text[:cut], text[cut:])
            for token in reader.tokenizer(part)["input_ids"]
        ]
        if len(ids) == len(own) and ids != own:
            assert reader.tokenizer.decode(ids) == text
            return own, ids
    raise AssertionError(f"{text!r} has no other tokens, equally many")


def texts_of(reader: TargetTokenizer, ids: list[int]) -> list[str]:
    return [reader.tokenizer.decode([token]) for token in ids]


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_listed_ids_are_taken_as_they_are(
    reader: TargetTokenizer, listed: bool, stopped: bool
) -> None:
    """Bug: sampled pieces are replaced by the own ones, or EOS is lost or doubled, whether listed or not."""
    _, sampled = in_pieces(reader, "dispatcher")
    (eos,) = reader.eos
    ended = [*sampled, eos] if stopped else sampled
    data = choice(
        "dispatcher", "stop" if stopped else "length", token_ids=ended if listed else sampled
    )
    reply = read_reply(data, PROMPT, LIMIT, reader)
    assert reply.ids == ended
    assert reply.finish_reason == ("eos" if stopped else "length")


def test_what_follows_an_eos_token_is_cut_off(reader: TargetTokenizer) -> None:
    """Bug: a server that samples on gives training text that the target had ended."""
    own = reader.tokenizer("import os")["input_ids"]
    (eos,) = reader.eos
    reply = read_reply(choice("import os", token_ids=[*own, eos, 77]), PROMPT, LIMIT, reader)
    assert (reply.ids, reply.finish_reason) == ([*own, eos], "eos")


@pytest.mark.parametrize("stopped", [False, True])
def test_texts_of_tokens_prove_which_they_were(reader: TargetTokenizer, stopped: bool) -> None:
    """Bug: text that was sampled in other pieces, equally many, is stored in the tokenizer's own pieces."""
    own, other = in_pieces(reader, "dispatcher")
    end = [""] if stopped else []
    finish = "stop" if stopped else "length"
    good = choice("dispatcher", finish, logprobs={"tokens": texts_of(reader, own) + end})
    assert read_reply(good, PROMPT, LIMIT, reader).ids[: len(own)] == own
    bad = choice("dispatcher", finish, logprobs={"tokens": texts_of(reader, other) + end})
    bad["usage"] = {"completion_tokens": len(own) + stopped}
    with pytest.raises(UnusableReplyError, match="skipped_round_trip"):
        read_reply(bad, PROMPT, LIMIT, reader)


@pytest.mark.parametrize(("more", "usable"), [(-1, False), (0, True), (1, False)])
def test_the_number_of_tokens_must_be_the_server_s(
    reader: TargetTokenizer, more: int, usable: bool
) -> None:
    """Bug: a cut character or a dropped special token goes unnoticed."""
    own = reader.tokenizer("import os")["input_ids"]
    data = choice("import os") | {"usage": {"completion_tokens": len(own) + more}}
    if usable:
        assert read_reply(data, PROMPT, LIMIT, reader).ids == own
    else:
        with pytest.raises(UnusableReplyError, match="skipped_round_trip"):
            read_reply(data, PROMPT, LIMIT, reader)


@pytest.mark.parametrize(
    ("stop_reason", "known"), [(None, True), (0, True), (77, False), ("END", False)]
)
def test_only_an_eos_token_may_end_a_reply(
    reader: TargetTokenizer, stop_reason: Any, known: bool
) -> None:
    """Bug: a stop string or another token is stored as the target's EOS."""
    own = reader.tokenizer("import os")["input_ids"]
    data = choice("import os", "stop", stop_reason=stop_reason)
    if known:
        assert read_reply(data, PROMPT, LIMIT, reader).ids == [*own, *reader.eos]
    else:
        with pytest.raises(UnusableReplyError, match="skipped_end"):
            read_reply(data, PROMPT, LIMIT, reader)


@pytest.mark.parametrize(
    "data",
    [
        None, [], {}, {"choices": None}, {"choices": []}, {"choices": ["a"]}, choice(None),  # type: ignore[arg-type]
        choice("a", "abort"), choice("a", None), choice(""), choice("a" * 99),  # type: ignore[arg-type]
        choice("a", token_ids="1 2"), choice("a", token_ids=[1.5]), choice("a", token_ids=[True]),
        choice("a", token_ids=[-1]), choice("", token_ids=[]), choice("a\ud800"),
    ],
)  # fmt: skip
def test_malformed_answers_are_refused(reader: TargetTokenizer, data: Any) -> None:
    """Bug: an answer that is no answer ends in a traceback or becomes a row."""
    with pytest.raises(MalformedReplyError):
        read_reply(data, PROMPT, LIMIT, reader)


@pytest.mark.parametrize(
    "more", [{"token_ids": [300, 301]}, {"token_ids": [10**6]}, {"prompt_token_ids": [20, 21]}]
)
def test_another_model_s_answers_are_refused(reader: TargetTokenizer, more: dict) -> None:
    """Bug: the server has another tokenizer or adds a BOS, and its ids are learned as the target's."""
    with pytest.raises(ForeignReplyError):
        read_reply(choice("import os", **more), PROMPT, LIMIT, reader)
