"""How results name the target that they are of.

They keep its fingerprint (decode/model/fingerprint.py), and compare it when they are continued or used: shards of
answers, the manifest of features (with the samples), checkpoints and draftsmith.json (with `sample_store.rows_digest`
of each set and the checksum of draft.init), journals of evaluation (with the checksums of drafts), written.jsonl. Other
weights are refused there, unless --allow_changed is true; another dtype of samples is warned of, and so is a draft that
was trained for another target: it decodes losslessly. What earlier versions left names no target and is accepted.
"""

from dataclasses import dataclass

from decode.common.published import Argument, Digest, Name, Place, Revision, ServedName, Word
from decode.common.target_settings import QUANTIZED_DTYPES
from decode.common.typed_json import Omitted


@dataclass(frozen=True)
class ModelFingerprint:
    """What computed something: equal for the same weights and arithmetic, whatever the folder is called."""

    weights: Omitted[Digest] = None
    """16 hex digits (`weights_fingerprint`); None: they were not to be seen, as those of a server."""
    dtype: Omitted[Word] = None
    """What was computed in, as the commands call it."""
    revision: Omitted[Revision] = None
    """Commit, tag or branch on the Hub. It says nothing more where the weights are known."""
    served_as: Omitted[ServedName] = None
    """The server's name for the model, where a server computed."""
    chat_template: Omitted[Digest] = None
    """16 hex digits of the chat template, with its arguments, that rendered what was answered; None: it had none, or
    nothing was rendered."""


@dataclass(frozen=True)
class TargetRecord:
    """A target as results record it: what it is called, and the fields of its ModelFingerprint."""

    name: Place = ""
    revision: Revision | None = None
    tokenizer: Omitted[Digest] = None
    template: Omitted[dict[Name, Argument]] = None
    """The chat template's name and arguments, if it is not the tokenizer's own one without arguments."""
    weights: Omitted[Digest] = None
    dtype: Omitted[Word] = None
    served_as: Omitted[ServedName] = None
    chat_template: Omitted[Digest] = None

    @property
    def rounding(self) -> str:
        """ " in w8a8", or another dtype that rounds the weights of a loaded target and so makes it another model; else
        empty."""
        return f" in {self.dtype}" if self.dtype in QUANTIZED_DTYPES else ""


def difference(then: ModelFingerprint, now: ModelFingerprint) -> str:
    """How `now` is another target than `then`: "weights 01… then, 23… now"; "" if it is the same or cannot be told."""
    known = then.weights is not None and now.weights is not None
    names = ("weights", "dtype") if known else ("revision", "dtype", "served_as")
    names = (*names, "chat_template")
    pairs = {name: (vars(then)[name], vars(now)[name]) for name in names}
    return ", ".join(
        f"{name.replace('_', ' ')} {a} then, {b} now"
        for name, (a, b) in pairs.items()
        if a is not None and b is not None and a != b
    )
