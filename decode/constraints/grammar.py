"""Which tokens a grammar allows next, and matchers of JSON schemas, regular expressions and Lark grammars.

The latter are of llguidance, which is optional: extra `grammar`.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.common.errors import UserError, first_line
from decode.common.files import read_text
from decode.common.target_settings import ConstraintConfig
from decode.model.loading import Target


class Matcher:
    """Knows the tokens of one text so far and which ones its grammar allows next.

    EOS is allowed where the text may end, and only there. It is never given to `advance`: the text ends with it.
    """

    def copy(self) -> "Matcher":
        """Another matcher at the same position, which later changes of this one do not move."""
        raise NotImplementedError

    def allowed(self) -> Tensor:
        """[V] bool on the CPU: the tokens that may come next; none where no token of the vocabulary fits."""
        raise NotImplementedError

    def advance(self, tokens: Sequence[int]) -> int:
        """Moves behind the leading tokens that the grammar allows and returns how many they are."""
        raise NotImplementedError

    def rollback(self, count: int) -> None:
        raise NotImplementedError


# ---- llguidance ----


class LLGuidanceMatcher(Matcher):
    """A matcher of llguidance for a vocabulary of `vocab_size` ids.

    Where the grammar forces the next bytes, llguidance allows one way of writing them in tokens, the tokenizer's own.
    """

    def __init__(self, matcher: Any, vocab_size: int):
        self.matcher, self.vocab_size = matcher, vocab_size

    def copy(self) -> "LLGuidanceMatcher":
        return LLGuidanceMatcher(self.matcher.deep_copy(), self.vocab_size)

    def allowed(self) -> Tensor:
        """UserError if the grammar got too complex for llguidance's limits."""
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        found = np.unpackbits(bits, bitorder="little")[: self.vocab_size]
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[: len(found)] = torch.from_numpy(found.view(np.bool_))
        return mask

    def advance(self, tokens: Sequence[int]) -> int:
        taken = self.matcher.try_consume_tokens(list(tokens))
        self._check()
        return int(taken)

    def rollback(self, count: int) -> None:
        self.matcher.rollback(count)
        self._check()

    def _check(self) -> None:
        if self.matcher.is_error():
            raise UserError(f"the grammar failed: {_first_line_of(self.matcher)}")


def build_matcher(config: ConstraintConfig, target: Target) -> Matcher | None:
    """The matcher of the settings at the start of a text; None if they name no grammar.

    UserError for more than one grammar, one that is invalid, llguidance missing, and a target without EOS.
    """
    given = [name for name, value in vars(config).items() if value]
    if not is_constrained(config):
        return None
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are given: a text follows one grammar")
    if not target.eos:
        raise UserError(f"target {target.name!r} has no EOS, which ends a constrained text")
    guidance = import_llguidance()
    (name,) = given
    try:
        source = _source(config, guidance.LLMatcher)
    except ValueError as error:
        raise UserError(f"{name} is no JSON object: {first_line(error)}") from error
    tokenizer = _tokenizer(target)
    matcher = guidance.LLMatcher(tokenizer, source, log_level=0)
    if matcher.is_error():
        raise UserError(f"{name} is no grammar that llguidance knows: {_first_line_of(matcher)}")
    return LLGuidanceMatcher(matcher, target.runner.vocab_size)


def is_constrained(config: ConstraintConfig) -> bool:
    return any(vars(config).values())


def import_llguidance() -> Any:
    """The package. UserError if it is not installed."""
    try:
        import llguidance
        import llguidance.hf
    except ImportError as error:
        raise UserError(
            "constrained decoding needs llguidance: pip install 'llguidance>=1.9,<2'"
        ) from error
    return llguidance


def _source(config: ConstraintConfig, builder: Any) -> str:
    """The grammar in llguidance's own form."""
    if config.regex:
        return str(builder.grammar_from_regex(config.regex))
    if config.grammar:
        return str(builder.grammar_from_lark(read_text(config.grammar)))
    inline = config.json_schema.lstrip().startswith("{")
    text = config.json_schema if inline else read_text(config.json_schema)
    return str(builder.grammar_from_json_schema(json.dumps(json.loads(text))))


def _first_line_of(matcher: Any) -> str:
    """Of llguidance's message on the error that the matcher is in."""
    return first_line(ValueError(matcher.get_error()))


def _tokenizer(target: Target) -> Any:
    """llguidance's view of the target's tokenizer; EOS are all ids that end a text of the target."""
    hf = import_llguidance().hf
    size = max(len(target.tokenizer), target.runner.vocab_size)
    try:
        return hf.from_tokenizer(target.tokenizer, n_vocab=size, eos_token=sorted(target.eos))
    except ValueError as error:
        raise UserError(
            f"llguidance cannot use the tokenizer of {target.name!r}: {first_line(error)}"
        ) from error
