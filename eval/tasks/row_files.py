"""The rows of files, folders and data sets of the Hugging Face Hub, read alike by training and evaluation.

What a row means is decided in row_forms.py. A row that is no JSON object is given with its error, so that whoever reads
may skip it; a file that cannot be read at all is a UserError.
"""

import hashlib
import itertools
import json
import random
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.common import damage
from decode.common.disk_errors import disk_error
from decode.common.errors import UserError
from decode.common.files import parse_json, read_lines, read_text
from decode.model.names import cache_error, check_name, load_error
from eval.tasks.row_forms import drop_arrow_nulls, prompt_columns

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
PACKED = (".gz", ".zst")
NOT_ROWS = frozenset(("dataset_info.json", "dataset_infos.json"))
"""Files of data sets that describe them."""
ROWS_A_PASS = 50_000
"""Rows in memory while a file without places for its rows is read in random order."""
SHUFFLE_BUFFER = 10_000
"""Rows of a streamed data set that are shuffled together."""


@dataclass(frozen=True)
class DatasetRow:
    """One row, and its location for error messages."""

    fields: dict[str, Any]
    location: str
    error: str = ""
    """Why it cannot be read; empty if it can. It names the location."""


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
        yield from _shuffled_lines(path, rng)
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

    A local folder of data files will do. UserError with name, config, split and reason if it cannot be loaded.
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
        raise UserError(
            f"{what} ({load_error(name, 'dataset', error)}): check its name, config, split and the network"
        ) from error


_ENDINGS = f"{', '.join(SUFFIXES)}, or in these and {' or '.join(PACKED)}"


def file_kind(path: Path) -> str:
    """The suffix of SUFFIXES that says how a file is read, without that of its compression; "" for other files."""
    kind = Path(path.stem).suffix if path.suffix in PACKED else path.suffix
    return kind if kind in SUFFIXES else ""


def data_files(folder: Path, split: str) -> list[Path]:
    """The files with rows in a folder and those below it, sorted; only those named after `split`, if there are any.

    UserError for none.
    """
    below = (file.relative_to(folder) for file in sorted(folder.rglob("*")))
    found = [
        file
        for file in below
        if file_kind(file)
        and file.name not in NOT_ROWS
        and not any(part.startswith(".") for part in file.parts)
    ]
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
        yield from _parquet_rows(path)
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
    rows = _list_inside(values) if isinstance(values, dict) else values
    if not isinstance(rows, list):
        raise UserError(f"{path} is not a list of JSON objects, nor one object on each line")
    for number, row in enumerate(rows, 1):
        yield _parse_row(json.dumps(row), f"{path}, row {number}")  # a fault is of this row alone


def _line_rows(path: Path) -> Iterator[DatasetRow]:
    for number, line in enumerate(read_lines(path), 1):
        if line.strip() != "":
            yield _parse_row(line, f"{path}:{number}")


def _list_inside(fields: dict[str, Any]) -> list[Any] | None:
    """The list of rows in an object that is none itself, such as {"data": [...]}."""
    values = list(fields.values())
    if len(values) != 1 or not isinstance(values[0], list) or prompt_columns(fields):
        return None
    return values[0]


def _parse_row(line: str, where: str) -> DatasetRow:
    try:
        fields = parse_json(line.rstrip("\n"), where, "write one JSON value per line")
    except UserError as error:
        return DatasetRow({}, where, str(error))
    if not isinstance(fields, dict):
        return DatasetRow({}, where, f"{where} is not a JSON object")
    return DatasetRow(fields, where)


def _parquet_rows(path: Path) -> Iterator[DatasetRow]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            features = None
            if "arrow.json" in str(file.schema_arrow):  # values of any form, stored as texts
                import datasets

                features = datasets.Features.from_arrow_schema(file.schema_arrow)
            rows = (row for batch in file.iter_batches(1000) for row in batch.to_pylist())
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
    if isinstance(data, datasets.Dataset):
        return data
    if split not in data:
        names = ", ".join(data)
        raise UserError(
            f"{path} has no split {split!r}, but {names}: name the folder of one of them"
        )
    return data[split]


def _table_rows(data: Any, where: str, rng: random.Random | None) -> Iterator[DatasetRow]:
    order = array("q", range(len(data)))
    if rng is not None:
        rng.shuffle(order)  # type: ignore[arg-type]
    for index in order:
        fields = drop_arrow_nulls(data[index], data.features)
        yield DatasetRow(fields, f"{where}, row {index}")


def _shuffled(rows: Callable[[], Iterator[DatasetRow]], rng: random.Random) -> Iterator[DatasetRow]:
    """The rows in random order: each pass over all of them keeps the next ROWS_A_PASS of that order."""
    order = array("q", range(sum(1 for _ in rows())))
    rng.shuffle(order)  # type: ignore[arg-type]
    for start in range(0, len(order), ROWS_A_PASS):
        chosen = order[start : start + ROWS_A_PASS]
        wanted = set(chosen)
        kept = {index: row for index, row in enumerate(rows()) if index in wanted}
        yield from (kept.pop(index) for index in chosen)


def _shuffled_lines(path: Path, rng: random.Random) -> Iterator[DatasetRow]:
    """`_shuffled` for a file of JSON lines, with only the places of the lines in memory."""
    starts, numbers, end = array("q"), array("q"), 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.decode().strip("\ufeff").strip() != "":
                    starts.append(end)
                    numbers.append(number)
                end += len(line)
            order = array("q", range(len(starts)))
            rng.shuffle(order)  # type: ignore[arg-type]
            for i in order:
                file.seek(starts[i])
                yield _parse_row(file.readline().decode("utf-8-sig"), f"{path}:{numbers[i]}")
    except (OSError, UnicodeDecodeError):
        read_text(path)  # raises the UserError that names the fault
        raise
