"""From what a server said to the token ids that were sampled, or the reason why they are not known.

Servers that list the sampled ids are believed if these ids decode to the text beside them. Otherwise the text is
tokenised again, and used only if that gives back the same text, and the same tokens' texts or at least as many tokens
as the server says. What is then skipped is no random part of the answers; and where a server only counts its tokens, a
text that was sampled in other pieces, equally many, is not noticed.
"""

from dataclasses import dataclass
from typing import Any

from decode.serving.running.completions import ForeignReplyError, MalformedReplyError
from train.data.prompt_pipeline import TargetTokenizer

UNDECODABLE = "\ufffd"
"""What stands in a text for bytes that are no character."""


class UnusableReplyError(Exception):
    """A complete reply whose tokens are not known; `str` is a key of `rows.SKIPPED`."""


@dataclass(frozen=True)
class Reply:
    """A reply as the local engine would have given it: its ids up to the first EOS, which is kept."""

    ids: list[int]
    finish_reason: str
    """eos or length."""
    listed: bool
    """The server lists `token_ids`, so that log-probabilities are not needed for them."""


def read_reply(data: Any, prompt_ids: list[int], limit: int, reader: TargetTokenizer) -> Reply:
    """The reply in a response to /completions for `prompt_ids`, of at most `limit` tokens.

    MalformedReplyError, ForeignReplyError, or UnusableReplyError if the tokens or the end of the reply are not known.
    """
    choice = _only_choice(data)
    text, finish = choice["text"], choice["finish_reason"]
    if choice.get("prompt_token_ids") not in (None, prompt_ids):
        raise ForeignReplyError("the server read other prompt tokens than were sent")
    listed = _listed_ids(choice)
    if listed is None:
        ids = _ids_of_text(data, choice, reader)
    else:
        ids = _up_to_eos(listed, reader.eos)
        _check_text(ids, text, reader)
    if finish == "stop" and not (ids and ids[-1] in reader.eos):
        ids = [*ids, _end_token(choice.get("stop_reason"), reader)]
    if not 0 < len(ids) <= limit:
        raise MalformedReplyError(f"{len(ids)} tokens, but 1 to {limit} were asked")
    ended = ids[-1] in reader.eos
    return Reply(ids, "eos" if ended else "length", choice.get("token_ids") is not None)


def _only_choice(data: Any) -> dict[str, Any]:
    """The one choice of a response, with a text and a known end."""
    choices = data.get("choices") if isinstance(data, dict) else None
    if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
        raise MalformedReplyError("no response with one choice")
    choice: dict[str, Any] = choices[0]
    text = choice.get("text")
    if not isinstance(text, str) or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise MalformedReplyError("a choice without text, or with half a character in it")
    if choice.get("finish_reason") not in ("stop", "length"):
        raise MalformedReplyError(f"finish_reason {choice.get('finish_reason')!r:.40}")
    return choice


def _listed_ids(choice: dict[str, Any]) -> list[int] | None:
    """The ids of the sampled tokens: `token_ids`, or the `id` of each log-probability (llama.cpp)."""
    ids = choice.get("token_ids")
    if ids is None:
        logprobs = choice.get("logprobs")
        content = logprobs.get("content") if isinstance(logprobs, dict) else None
        if not isinstance(content, list) or not all(
            isinstance(token, dict) and "id" in token for token in content
        ):
            return None
        ids = [token["id"] for token in content]
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise MalformedReplyError("token ids that are no numbers")
    return ids


def _ids_of_text(
    data: dict[str, Any], choice: dict[str, Any], reader: TargetTokenizer
) -> list[int]:
    """The text tokenised again. UnusableReplyError if it is seen that other tokens were sampled.

    The texts of the sampled tokens prove that they were these. Their number alone does not: the same text may have been
    sampled in other pieces, equally many. Both may include an EOS token that is not part of the text.
    """
    text, extra = choice["text"], (0, 1) if choice["finish_reason"] == "stop" else (0,)
    fast = reader.tokenizer.is_fast
    encoded = reader.tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"] if fast else []
    logprobs, usage = choice.get("logprobs"), data.get("usage")
    sampled = logprobs.get("tokens") if isinstance(logprobs, dict) else None
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if isinstance(sampled, list):
        pieces = [_decode(reader, [token]) for token in ids]
        slices = [text[start:end] for start, end in offsets]  # with their spaces
        ends = [sampled[: len(sampled) - more] for more in extra]
        same = pieces in ends or slices in ends
    else:
        same = type(count) is not int or count - len(ids) in extra
    if UNDECODABLE in text or _decode(reader, ids) != text or not same:
        raise UnusableReplyError("skipped_round_trip")
    return _up_to_eos(ids, reader.eos)


def _check_text(ids: list[int], text: str, reader: TargetTokenizer) -> None:
    """ForeignReplyError unless the ids mean `text` in the target's tokenizer, with or without special tokens.

    White space and halves of characters are not compared: servers that decode token by token treat them in other ways.
    """
    body = ids[:-1] if ids and ids[-1] in reader.eos else ids
    if any(token >= len(reader.tokenizer) for token in body):
        raise ForeignReplyError("tokens that the target's tokenizer does not have")
    meanings = (_decode(reader, ids), _decode(reader, body), _decode(reader, body, True))
    if _letters(text) not in map(_letters, meanings):
        raise ForeignReplyError("the server's tokens mean other texts in the target's tokenizer")


def _end_token(stop_reason: Any, reader: TargetTokenizer) -> int:
    """The EOS token of a reply that ended without listing it: the one that the server names, else the tokenizer's own,
    else the only one. UnusableReplyError if something else ended the reply, or it is not known which one."""
    only = next(iter(reader.eos)) if len(reader.eos) == 1 else None
    own = reader.tokenizer.eos_token_id
    usual = own if own in reader.eos else only
    token = usual if stop_reason is None else stop_reason
    if type(token) is int and token in reader.eos:
        return token
    raise UnusableReplyError("skipped_end")


def _up_to_eos(ids: list[int], eos: frozenset[int]) -> list[int]:
    """The ids up to the first EOS, which is kept: sampling would have ended there."""
    end = next((i for i, token in enumerate(ids) if token in eos), len(ids))
    return ids[: end + 1]


def _decode(reader: TargetTokenizer, ids: list[int], skip_special: bool = False) -> str:
    spaces = {"clean_up_tokenization_spaces": False}
    return str(reader.tokenizer.decode(ids, skip_special_tokens=skip_special, **spaces))


def _letters(text: str) -> str:
    return "".join(text.replace(UNDECODABLE, "").split())
