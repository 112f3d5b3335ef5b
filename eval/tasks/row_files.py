"""The rows of files, folders and data sets of the Hugging Face Hub, read alike by training and evaluation.

What a row means is decided in row_forms.py. A row that is no JSON object is given with its error, so that whoever reads
may skip it; a file that cannot be read at all is a UserError.
"""

import functools
import hashlib
import itertools
import json
import random
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from decode.common import damage
from decode.common.errors import UserError, disk_error
from decode.common.files import parse_json, read_lines, read_text
from decode.model.names import cache_error, check_name, load_error
from eval.tasks.row_forms import PROMPT_COLUMNS, DatasetRow, drop_arrow_nulls

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
PACKED = (".gz", ".zst")
NOT_ROWS = frozenset(
    ("dataset_info", "dataset_infos", "readme", "license", "licence", "notice", "requirements")
)
"""Names, without endings and in small letters, of files beside rows that describe them."""
OTHER_FOLDERS = {
    "a sampled set of train/sample.py": ("manifest.json", "shards"),
    "a model's folder": ("config.json", "tokenizer_config.json"),
}
"""{what a folder is: the files that it then has}."""
HIDDEN = (".", "__")
"""How the names of hidden files and folders begin, and of those that macOS leaves in archives."""
ROWS_A_PASS = 50_000
"""Rows in memory while a file without places for its rows is read in random order."""
SHUFFLE_BUFFER = 10_000  # rows of a streamed data set that are shuffled together


def read_rows(
    path: Path, split: str, rng: random.Random | None = None, whole_texts: bool = False
) -> Iterator[DatasetRow]:
    """The rows of a file, of all files in a folder, or of `split` in a folder of `save_to_disk`; with `rng` shuffled.

    A text file holds prompts with blank lines between them, or with `whole_texts` one `text`. UserError for a path that
    is not there or cannot be read.
    """
    if _is_saved(path):
        yield from _table_rows(_load_saved(path, split), str(path), rng)
        return
    if path.is_dir():
        files = data_files(path, split)
    elif file_kind(path):
        files = [path]
    else:
        raise UserError(f"{path}: must end in {_ENDINGS}, or be a folder of such files")

    def rows() -> Iterator[DatasetRow]:
        return itertools.chain.from_iterable(_file_rows(file, whole_texts) for file in files)

    if rng is None:
        yield from rows()
    elif path.suffix == ".jsonl" and path.is_file():
        yield from _shuffled_lines(path, rows, rng)
    else:
        yield from _shuffled(rows, rng)


def read_hub_rows(
    name: str,
    config: str | None,
    split: str,
    revision: str | None = None,
    streaming: bool = False,
    rng: random.Random | None = None,
) -> Iterator[DatasetRow]:
    """The rows of a data set of the Hub, with `rng` shuffled (with `streaming` among neighbours only).

    A file or a folder on this disk will do. UserError as in `read_rows` and `load_hub_dataset`.
    """
    path = Path(name)
    if path.is_file() or _is_saved(path):
        yield from read_rows(path, split, rng)
        return
    data = load_hub_dataset(name, config, split, revision, streaming)
    where = f"hub data set {name!r}"
    if not streaming:
        yield from _table_rows(data, where, rng)
        return
    if rng is not None:
        data = data.shuffle(rng.getrandbits(32), buffer_size=SHUFFLE_BUFFER)
    for number, values in enumerate(data):
        yield DatasetRow(drop_arrow_nulls(values, data.features), f"{where}, row {number}")


def load_hub_dataset(
    name: str,
    config: str | None,
    split: str,
    revision: str | None = None,
    streaming: bool = False,
) -> Any:
    """One split of a data set of the Hugging Face Hub: a Dataset, or with `streaming` an IterableDataset.

    A local folder of data files will do. UserError with name, config, split and reason if it cannot be loaded, and as
    in `pick_split`.
    """
    import datasets  # slow to import, and only Hub data sets need it

    check_name(name, "hub data set", "dataset")
    try:
        return datasets.load_dataset(
            name, config, split=split, revision=revision, streaming=streaming
        )
    except Exception as error:  # network, name, format and script errors have no common class
        what = f"hub data set {name!r} (config {config}, split {split!r}) cannot be loaded"
        if refused := cache_error(error) or disk_error(error):
            raise UserError(f"{what}: {refused}") from error
        found = hub_split(name, config, split, revision)
        if found != split:
            return load_hub_dataset(name, config, found, revision, streaming)
        raise UserError(
            f"{what} ({load_error(name, 'dataset', error)}): check its name, config, split and the network"
        ) from error


@functools.cache
def hub_split(name: str, config: str | None, split: str, revision: str | None = None) -> str:
    """What `pick_split` takes of a data set of the Hub; `split` where the splits cannot be found out."""
    import datasets

    try:
        names = datasets.get_dataset_split_names(name, config, revision=revision)
    except Exception:  # load_hub_dataset meets it again and says it
        return split
    return pick_split(names, split, f"hub data set {name!r}")


def pick_split(names: Sequence[str], split: str, where: str) -> str:
    """`split` (or a slice or a sum that begins with it) if it is one of `names`, else their only one, with a warning.

    UserError, which lists them, for several others.
    """
    if re.split(r"[\[+]", split)[0] in (*names, "all"):
        return split
    if len(names) != 1:
        raise UserError(
            f"{where} has no split {split!r}, but {', '.join(names)}: set `split` to one of them"
        )
    damage.warn_once(f"{where} has no split {split!r}: its only one, {names[0]!r}, is read")
    return names[0]


_ENDINGS = f"{', '.join(SUFFIXES)}, or, but for .parquet, in these and {' or '.join(PACKED)}"


def file_kind(path: Path) -> str:
    """The suffix of SUFFIXES that says how a file is read, without that of its compression; "" for other files."""
    kind = Path(path.stem).suffix if path.suffix in PACKED else path.suffix
    return kind if kind in SUFFIXES else ""


def data_files(folder: Path, split: str) -> list[Path]:
    """The files with rows in a folder and those below it, sorted; only those named after `split`, if there are any.

    UserError for none, for a folder of `save_to_disk` below it, and for the folder of a sampled set or of a model.
    """
    for what, files in OTHER_FOLDERS.items():
        if all((folder / file).exists() for file in files):
            raise UserError(f"{folder} is {what}, not one of rows: name a file or a folder of rows")
    below = [file.relative_to(folder) for file in sorted(folder.rglob("*"))]
    found = [
        file
        for file in below
        if file_kind(file)
        and file.name.partition(".")[0].lower() not in NOT_ROWS
        and not any(part.startswith(HIDDEN) for part in file.parts)
    ]
    saved = next((folder / file for file in below if _is_saved(folder / file)), None)
    if saved is not None:
        raise UserError(f"{folder} holds {saved}, a folder of save_to_disk: name that one")
    name = re.compile(rf"(?<![a-z0-9]){re.escape(split)}(?![a-z0-9])", re.IGNORECASE)
    named = [file for file in found if name.search(str(file))]
    if not found:
        raise UserError(f"{folder} holds no file that ends in {_ENDINGS}: name another folder")
    return [folder / file for file in named or found]


def digest(path: Path) -> str:
    """The first 12 hex digits of the SHA-256 of a file, or of the names and bytes of all files in a folder."""
    if path.is_file():
        return damage.sha256(path)[:12]
    total = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        total.update(f"{file.relative_to(path)}\0{digest(file)}\0".encode())
    return total.hexdigest()[:12]


def _file_rows(path: Path, whole_texts: bool) -> Iterator[DatasetRow]:
    kind = file_kind(path)
    if kind == ".parquet":
        yield from parquet_rows(path)
    elif kind == ".txt":
        texts = [read_text(path)] if whole_texts else _paragraphs(path)
        column = "text" if whole_texts else "prompt"
        for number, text in enumerate(texts, 1):
            if text.strip() != "":
                yield DatasetRow({column: text}, f"{path}, paragraph {number}")
    elif kind == ".jsonl":
        yield from _line_rows(path)
    else:
        yield from _json_rows(path)


def _json_rows(path: Path) -> Iterator[DatasetRow]:
    """The objects in a list, or in the only list of an object; of a file of JSON lines those of its lines."""
    first = next((line for line in read_lines(path) if line.strip() != ""), "")
    if first.lstrip().startswith("{"):
        alone = _parse_row(first, str(path))
        if not alone.error and _list_inside(alone.fields) is None:
            yield from _line_rows(path)
            return
    text = read_text(path)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = parse_json(text, str(path), "write a list of objects, or one on each line")
    rows = (_list_inside(values) or [values]) if isinstance(values, dict) else values
    if not isinstance(rows, list):
        raise UserError(f"{path} is not a list of JSON objects, nor one object on each line")
    for number, row in enumerate(rows, 1):
        yield _parse_row(json.dumps(row), f"{path}, row {number}")  # a fault is of this row alone


def _line_rows(path: Path) -> Iterator[DatasetRow]:
    for number, line in enumerate(read_lines(path), 1):
        if line.strip("\ufeff").strip() != "":
            yield _parse_row(line, f"{path}:{number}")


def _list_inside(fields: dict[str, Any]) -> list[Any] | None:
    """The list of rows in an object that is none itself, such as {"data": [...]}."""
    values = list(fields.values())
    alone = len(values) == 1 and PROMPT_COLUMNS.isdisjoint(fields)
    return values[0] if alone and isinstance(values[0], list) else None


def _parse_row(line: str, where: str) -> DatasetRow:
    try:
        # files that were put together may have a byte order mark within
        fields = parse_json(line.strip("\ufeff\n"), where, "write one JSON value per line")
    except UserError as error:
        return DatasetRow({}, where, str(error))
    if not isinstance(fields, dict):
        return DatasetRow({}, where, f"{where} is not a JSON object")
    return DatasetRow(fields, where)


def parquet_rows(path: Path, columns: Sequence[str] = ()) -> Iterator[DatasetRow]:
    """The rows of a Parquet file, with all columns or those that are named. UserError if it cannot be read or lacks
    one of them."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            absent = sorted(set(columns).difference(file.schema_arrow.names))
            if absent:
                raise UserError(f"{path} has no column {absent[0]}: give a file that has one")
            features = None
            if "arrow.json" in str(file.schema_arrow):  # values of any form, stored as texts
                import datasets

                features = datasets.Features.from_arrow_schema(file.schema_arrow)
            batches = file.iter_batches(1000, columns=columns or None)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, values in enumerate(rows, 1):
                fields = values if features is None else features.decode_example(values)
                yield DatasetRow(drop_arrow_nulls(fields, features), f"{path}, row {number}")
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: check the path") from error
    except (OSError, pyarrow.ArrowException) as error:
        if refused := disk_error(error, path):
            raise UserError(refused) from error
        raise UserError(f"{path} cannot be read as Parquet: download or save it again") from error


def _paragraphs(path: Path) -> Iterator[str]:
    """What stands between blank lines; of two blank lines the second one belongs to the paragraph behind them."""
    lines: list[str] = []
    for line in itertools.chain(read_lines(path), ["\n"]):
        if lines and line.strip(" \t") == "\n":
            yield "".join(lines).strip("\n")
            lines = []
        else:
            lines.append(line)


def _is_saved(path: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` has made this folder."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def _load_saved(path: Path, split: str) -> Any:
    """The Dataset of a folder of `save_to_disk`, of several splits that of `split`. UserError if there is none."""
    import datasets

    try:
        data = datasets.load_from_disk(str(path))
    except Exception as error:  # files of other versions and damaged ones have no common class
        refused = cache_error(error) or disk_error(error, path)
        damaged = f"{path}: {load_error(str(path), 'dataset', error)}: save it again"
        raise UserError(refused or damaged) from error
    return (
        data if isinstance(data, datasets.Dataset) else data[pick_split([*data], split, str(path))]
    )


def _table_rows(data: Any, where: str, rng: random.Random | None) -> Iterator[DatasetRow]:
    for index in range(len(data)) if rng is None else _shuffled_numbers(len(data), rng):
        fields = drop_arrow_nulls(data[index], data.features)
        yield DatasetRow(fields, f"{where}, row {index}")


def _shuffled_numbers(count: int, rng: random.Random) -> Sequence[int]:
    order = array("q", range(count))
    rng.shuffle(order)  # type: ignore[arg-type]
    return order


def _shuffled(rows: Callable[[], Iterator[DatasetRow]], rng: random.Random) -> Iterator[DatasetRow]:
    """The rows in random order: each pass over all of them keeps the next ROWS_A_PASS of that order."""
    order = _shuffled_numbers(sum(1 for _ in rows()), rng)
    for start in range(0, len(order), ROWS_A_PASS):
        chosen = order[start : start + ROWS_A_PASS]
        wanted = set(chosen)
        kept = {index: row for index, row in enumerate(rows()) if index in wanted}
        yield from (kept.pop(index) for index in chosen)


def _shuffled_lines(
    path: Path, rows: Callable[[], Iterator[DatasetRow]], rng: random.Random
) -> Iterator[DatasetRow]:
    """`_shuffled` for a file of JSON lines, with only the places of the lines in memory."""
    starts, numbers, end = array("q"), array("q"), 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if b"\r" in line.rstrip(b"\r\n"):  # which ends a line too
                    yield from _shuffled(rows, rng)
                    return
                if line.decode().strip("\ufeff").strip() != "":
                    starts.append(end)
                    numbers.append(number)
                end += len(line)
            for i in _shuffled_numbers(len(starts), rng):
                file.seek(starts[i])
                yield _parse_row(file.readline().decode(), f"{path}:{numbers[i]}")
    except (OSError, UnicodeDecodeError):
        read_text(path)  # raises the UserError that names the fault
        raise
