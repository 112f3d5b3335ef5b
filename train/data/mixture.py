"""Several sampled sets mixed by weight; the rows of a step are a function of seed and step alone."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from decode.common import damage, run_dir
from decode.common.errors import UserError
from decode.common.target_record import difference
from decode.common.typed_json import to_json
from decode.model.loading import Target, compare_tokenizers
from eval.tasks.images import FOLDER
from train.data import batching
from train.data.manifest import Manifest, load_set, read_manifest
from train.data.sample_store import Rows, SampleRow, Subset, image_names, rows_digest
from train.settings.data import DataSpec, MixturePart, Supervised


@dataclass
class ListedSet(MixturePart):
    """A set of a mixture, as draftsmith.json lists it."""

    manifest: Manifest | None = None


DataManifests = Manifest | list[ListedSet]


def mixture_parts(data: DataSpec) -> list[MixturePart]:
    """The parts that the setting `data` names. UserError for an empty list."""
    parts = [MixturePart(data)] if isinstance(data, str) else data
    if len(parts) == 0:
        raise UserError("data names no folder: give one, or a list of {path, weight}")
    return parts


def source_at(shares: Sequence[Fraction], place: int) -> tuple[int, int]:
    """(source of the row at `place` of the endless training order, number of that source's rows before it).

    Sources alternate as evenly as their shares allow: after any number of places each source has had its share of them
    to within the number of sources. The order depends on `place` alone, so a resumed run needs no state for it.
    """
    remaining = sum(shares, Fraction(0))
    # The last source takes its places, the sources before it share the remaining ones, and so on.
    for source in range(len(shares) - 1, 0, -1):
        share = shares[source] / remaining
        before = place * share.numerator // share.denominator
        if (place + 1) * share.numerator // share.denominator > before:
            return source, before
        place -= before
        remaining -= shares[source]
    return 0, place


class Mixture(Rows):
    """The rows of all sources, concatenated, and the endless order in which steps take them.

    Each source is taken in a new permutation every epoch. With several sources, ids are prefixed with the number of
    their source, so that answers to one prompt in two sources keep different ids.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[SampleRow]],
        weights: Sequence[float],
        digests: Sequence[str] = (),
        whole: "Mixture | None" = None,
        has_images: bool = False,
    ):
        """`digests` are the `rows_digest` of each set as it is on disk. `whole` has all rows of the sets where these
        are limited: those whose features are stored. `has_images`: some rows hold images, by the paths of their files.
        """
        self.has_images = has_images
        self.sources, self.digests, self.whole = sources, list(digests), whole or self
        self.shares = [Fraction(str(weight)) for weight in weights]
        self.offsets = np.cumsum([0, *map(len, sources)])  # index of each source's first row

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def read(self, index: int) -> SampleRow:
        source = int(np.searchsorted(self.offsets, index, side="right")) - 1
        row = self.sources[source][index - int(self.offsets[source])]
        return row if len(self.sources) == 1 else {**row, "id": f"{source}/{row['id']}"}

    def row_at(self, place: int, seed: int) -> SampleRow:
        source, number = source_at(self.shares, place)
        index = batching.shuffled_index(len(self.sources[source]), seed, number, source)
        return self[int(self.offsets[source]) + index]

    def global_batch(self, batch: int, seed: int, step: int) -> list[SampleRow]:
        """The `batch` rows of `step` (from 0), over all ranks."""
        return [self.row_at(place, seed) for place in range(step * batch, (step + 1) * batch)]


def load(
    data: DataSpec,
    max_length: int,
    target: Target | None = None,
    supervise: Supervised = "answers",
    seed: int = 0,
) -> tuple[Mixture, int]:
    """(the mixture with rows cut to `max_length` tokens, number of rows dropped because no label was left).

    With `supervise` all, the tokens of prompts are labels too. `seed` chooses the rows of a part with a limit.
    UserError for a set that `check_tokenizer` refuses for the target or that lacks an image, and as in `load_set`.
    """
    parts, dropped, has_images = mixture_parts(data), 0, False
    sources: list[Sequence[SampleRow]] = []
    digests: list[str] = []
    for part in parts:
        manifest, stored = load_set(Path(part.path))
        if target is not None:
            check_tokenizer(part.path, manifest, stored, target)
        digests.append(rows_digest(stored))
        rows, rows_dropped = batching.truncate_rows(stored, max_length)
        if supervise == "all":
            rows = Subset(rows, range(len(rows)), batching.supervise_whole_row)
        if images := image_names(Path(part.path)):
            has_images, folder = True, Path(part.path, FOLDER)
            check_images(folder, images)
            rows = Subset(rows, range(len(rows)), partial(locate_images, folder))
        sources.append(rows)
        dropped += rows_dropped
    whole = Mixture(sources, [part.weight for part in parts], digests, has_images=has_images)
    if not any(part.limit for part in parts):
        return whole, dropped
    limited = [
        Subset(rows, np.sort(shuffled(len(rows), seed)[: part.limit or None]))
        for part, rows in zip(parts, sources, strict=True)
    ]
    return Mixture(limited, [part.weight for part in parts], digests, whole, has_images), dropped


def check_images(folder: Path, names: Iterable[str]) -> None:
    """UserError for an image that the set has no file of."""
    for name in names:
        if not (folder / name).is_file():
            raise UserError(
                f"image {folder / name} is missing: run the train/sample.py command again, which stores it"
            )


def locate_images(folder: Path, row: SampleRow) -> SampleRow:
    """The row with the paths of its images in place of their names."""
    if "images" not in row:
        return row
    return {**row, "images": [str(folder / name) for name in row["images"]]}


class HasTokenizer(Protocol):
    """A target, or its tokenizer without a model (prompt_pipeline.py, which a training does not load)."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def fingerprint(self) -> str: ...


def check_tokenizer(
    path: str, manifest: Manifest, rows: Iterable[SampleRow], target: HasTokenizer
) -> None:
    """UserError for a set whose ids are other tokens for the target, or that holds a token which the target lacks.

    Where the model that was sampled still has its tokenizer, vocabularies that extend each other are one
    (`disagreement`); else only equal ones are.
    """
    theirs = manifest.tokenizer_hash
    if theirs == target.fingerprint:
        return
    found, own = compare_tokenizers(
        theirs, manifest.target, manifest.revision, target.tokenizer, "the samples"
    )
    if found is None:
        lacking = {*own.get_vocab().values()} - {*target.tokenizer.get_vocab().values()}
        foreign = (i for row in rows if lacking for i in row["input_ids"] if i in lacking)
        token = next(foreign, None)
        if token is None:
            return
        found = f"id {token} is {own.convert_ids_to_tokens(int(token))!r} for the samples and no token for the target"
    raise UserError(
        f"samples in {path} were made with tokenizer {theirs} (target {manifest.target}), but {target.name} has "
        f"{target.fingerprint}{', ' * bool(found)}{found}: sample this target"
    )


def check_target(data: DataSpec, target: Target, allowed: bool) -> None:
    """UserError for a set that a target with other weights answered, unless `allowed`; a warning for another dtype."""
    now = target.identity
    for part in mixture_parts(data):
        for then in read_manifest(Path(part.path)).fingerprints:
            found = difference(replace(then, dtype=None), now)
            if found:
                what = f"samples in {part.path} are answers of another target than {target.name!r} ({found})"
                run_dir.refuse_change(what, allowed, "or sample this target")
            elif difference(then, now):
                damage.warn(
                    f"samples in {part.path} were answered in {then.dtype}, and the target teaches in {now.dtype}"
                )


def templates_of(data: DataSpec) -> list[dict[str, Any]]:
    """The settings of the chat template that the prompts of all sets were rendered with, each once: those of the first
    set first, of each set the most frequent first."""
    found: list[dict[str, Any]] = []
    for part in mixture_parts(data):
        found += [x for x in read_manifest(Path(part.path)).templates() if x not in found]
    return found or [{}]


def shuffled(count: int, seed: int) -> NDArray[np.int64]:
    """The indices of `count` rows in the order in which a limit takes them."""
    return np.random.default_rng(seed).permutation(count)


def data_manifests(data: DataSpec) -> Any:
    """The manifest of one folder without its list of shards, or [{path, weight, limit, manifest}, …] of several."""
    if isinstance(data, str):
        return to_json(replace(read_manifest(Path(data)), shards=None))
    return [{**asdict(part), "manifest": data_manifests(part.path)} for part in mixture_parts(data)]
