"""Text, JSON and YAML files: atomic writing, and reading where every fault is one UserError that names the file; and
where the files of this project lie.

Text is UTF-8, with or without a byte order mark. What would break a later step is refused when it is read: halves of
surrogate pairs, values nested deeper than MAX_DEPTH, numbers of thousands of digits, and in YAML also keys that occur
twice and aliases that expand to more than MAX_YAML_NODES values.
"""

import contextlib
import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import yaml

from decode.common.errors import UserError, first_line, naming

MAX_DEPTH = 100
"""Lists and mappings within each other. Python's own limit lies a little higher and depends on who calls."""
MAX_YAML_NODES = 100_000
"""Values in a YAML file, each alias counted as a copy of what it stands for."""

RUN_FILE = "run.yaml"
"""What a command was asked to do, in its output folder; its first line is COMMAND_HEADER and the command's name."""
COMMAND_HEADER = "# command: "
BUNDLED = ("assets", "configs")
INSTALLED = Path(__file__).resolve().parents[1] / "bundled"
ROOT = INSTALLED if INSTALLED.is_dir() else INSTALLED.parents[1]
"""The folder that holds the BUNDLED ones: the checkout; in an install without one, where decode/build_wheel.py has put
them, in the package decode."""


def find_bundled(name: str) -> str:
    """The path that `name` means: assets/target and the like are this project's wherever a command is called, unless
    the current folder has its own; every other name is itself."""
    ours = name.startswith(tuple(f"{folder}/" for folder in BUNDLED)) and not Path(name).exists()
    return str(ROOT / name) if ours and (ROOT / name).exists() else name


class _Loader(yaml.SafeLoader):
    """Reads dates as texts: no setting is a date, and JSON has none."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":timestamp")]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces `path` by a file with `content`; text is written as UTF-8. Missing parent folders are made.

    After a crash or a power cut the old file or the new one is there, never a part of it: the data is synced before
    the rename, and the folder after it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with naming(path):
            with temporary.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    except OSError:  # such as a full disk
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_result(out: str, result: Mapping[str, object]) -> None:
    """Writes a command's result as one line of JSON into the file `out`, if that is not "", and prints it."""
    line = json.dumps(result) + "\n"
    if out:
        write_atomically(Path(out), line)
    sys.stdout.write(line)


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file without byte order mark, lines ended by line feeds. UserError if it cannot be read.

    A file whose name ends in .gz or .zst is decompressed.
    """
    with _open_text(Path(path)) as file:
        return file.read()


def read_lines(path: str | Path) -> Iterator[str]:
    """The lines of `read_text` with their line feeds, one in memory at a time."""
    with _open_text(Path(path)) as file:
        try:
            yield from file
        except UnicodeDecodeError:
            read_text(path)  # raises the UserError with its place in the whole file
            raise


@contextlib.contextmanager
def _open_text(path: Path) -> Iterator[IO[str]]:
    """The opened file; faults while it is opened or read are UserErrors."""
    try:
        with _unpacked(path) as packed, io.TextIOWrapper(packed, encoding="utf-8-sig") as file:
            yield file
    except FileNotFoundError as error:
        if path.is_symlink():
            raise UserError(f"{path} is a link to a file that does not exist: mend it") from error
        raise UserError(f"{path} does not exist: check the path") from error
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder: name a file in it") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from error
    except (OSError, EOFError, zlib.error, ValueError) as error:  # ValueError: a null character
        reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
        raise UserError(f"{path} cannot be read ({reason}): name a readable file") from error


def _unpacked(path: Path) -> IO[bytes] | gzip.GzipFile:
    """The opened file; reading it decompresses what .gz and .zst hold."""
    if path.suffix == ".gz":
        return gzip.open(path)
    file = path.open("rb")
    if path.suffix != ".zst":
        return file
    import pyarrow  # which has the decompressor; slow to import

    return pyarrow.input_stream(file, compression="zstd")


def read_json(path: str | Path) -> Any:
    """The parsed content of `path`. UserError that names the file when it is absent or not JSON."""
    return parse_json(read_text(path), str(path), "correct it or make it again")


def read_json_object(
    path: str | Path, what: str, keys: Sequence[str] = (), lists: Sequence[str] = ()
) -> dict[str, Any]:
    """The JSON object in `path`. UserError unless it has all `keys`, and lists of objects under the names in `lists`.

    `what` says what the file should be and who writes it, such as "tuned.json of eval/tune.py".
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path} is not {what}: it holds {_shape(value)}")
    missing = next((key for key in (*keys, *lists) if key not in value), None)
    if missing is not None:
        raise UserError(f"{path} is not {what}: it has no {missing!r}")
    for name in lists:
        if not isinstance(value[name], list) or not all(isinstance(x, dict) for x in value[name]):
            raise UserError(f"{path} is not {what}: {name!r} is no list of objects")
    return value


def parse_jsonl(text: str, path: str | Path) -> Iterator[tuple[str, Any]]:
    """("path:line", value) for each line that is not blank. UserError names path and line if it is not JSON."""
    # Lines end at line feeds only: JSON strings may hold others, such as U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip() != "":
            where = f"{path}:{number}"
            yield where, parse_json(line, where, "write one JSON value per line")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, {} for an empty one. UserError as in `read_text` and `parse_yaml`."""
    return parse_yaml(read_text(path), str(path))


def parse_yaml(text: str, name: str) -> dict[str, Any]:
    """The mapping that the YAML `text` holds, {} if it holds nothing; `name` is its file in error messages.

    UserError for anything but one mapping with text as keys, and for what the docstring of this module lists.
    """
    value = parse_yaml_value(text, name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{name} holds {_shape(value)}: write settings as lines of `name: value`")
    odd = next((key for key in value if not isinstance(key, str)), None)
    if odd is not None:
        raise UserError(f"{name}: the name {odd!r} is no text: write it in quotes or correct it")
    return value


def parse_yaml_value(text: str, name: str) -> Any:
    """What the YAML `text` holds, None if nothing. UserError for what the docstring of this module lists."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            _measure_node(node, name, {})
        value = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise UserError(f"{where} is not valid YAML ({error.problem}): correct it") from error
    except RecursionError as error:
        raise _too_deep(name) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number that is none
        reason = first_line(error).partition(";")[0]
        raise UserError(f"{name} is not valid YAML ({reason}): correct it") from error
    check_characters(value, name)
    return value


def parse_json(text: str, where: str, advice: str) -> Any:
    """The JSON value in `text`. UserError with `where` it stands and `advice` for what the docstring above lists."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if text.strip() == "":
            raise UserError(f"{where} is empty: {advice}") from error
        place = f"{error.msg}, line {error.lineno}, column {error.colno}"
        raise UserError(f"{where} is not valid JSON ({place}): {advice}") from error
    except RecursionError as error:
        raise _too_deep(where) from error
    except ValueError as error:
        raise _too_long_number(where) from error
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _children(outer)]
    if level:
        raise _too_deep(where)
    if "\\u" in text:  # only an escape can stand for a lone surrogate
        check_characters(value, where)
    return value


def _children(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def check_characters(value: Any, where: str) -> None:
    """UserError for text inside `value` that holds half of a surrogate pair: no tokenizer and no file takes it."""
    try:
        json.dumps(value, ensure_ascii=False, skipkeys=True, default=str).encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(error.object[error.start]):04x}"
        raise UserError(f"{where} has {code}, half of a surrogate pair: replace it") from error
    except ValueError as error:  # a hexadecimal number: only its decimal digits are limited
        raise _too_long_number(where) from error


def _measure_node(
    node: yaml.Node, name: str, known: dict[int, tuple[int, int] | None]
) -> tuple[int, int]:
    """(values in `node` with its aliases expanded, depth of their nesting); UserError for too many, too deep, and for
    keys that occur twice. `known` has the result of each node seen so far, None for those around `node`."""
    if id(node) in known:
        measured = known[id(node)]
        if measured is None:
            where = f"{name}:{node.start_mark.line + 1}"
            raise UserError(f"{where}: an alias contains itself: remove it")
        return measured
    known[id(node)] = None
    inner: list[yaml.Node] = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        inner = [child for pair in node.value for child in pair]
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                where = f"{name}:{key.start_mark.line + 1}"
                raise UserError(f"{where}: {key.value!r} is set twice: leave one out")
            keys.add(str(key.value))
    measures = [_measure_node(child, name, known) for child in inner]
    size = 1 + sum(nodes for nodes, _ in measures)
    depth = 1 + max((deep for _, deep in measures), default=0)
    if size > MAX_YAML_NODES:
        raise UserError(f"{name} expands to over {MAX_YAML_NODES:,} values: use fewer aliases")
    if depth > MAX_DEPTH:
        raise _too_deep(name)
    known[id(node)] = size, depth
    return size, depth


def _too_deep(where: str) -> UserError:
    return UserError(f"{where} is nested deeper than {MAX_DEPTH} levels: make it flat")


def _too_long_number(where: str) -> UserError:
    digits = sys.get_int_max_str_digits()
    return UserError(f"{where} has a number of over {digits} digits: correct it")


def _shape(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "nothing"}
    return names.get(type(value), "a single value")
