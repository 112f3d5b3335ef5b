"""assets/tasks/*.yaml, which describe how the rows of a data set become prompts."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from decode.common.errors import UserError, one_line
from decode.common.files import ROOT, read_yaml
from decode.model.names import is_local
from eval.tasks.row_files import read_hub_rows, read_rows
from eval.tasks.row_forms import DatasetRow

BUNDLED_PROMPTS = ROOT / "assets" / "prompts"
DATASET_SPECS_DIR = ROOT / "assets" / "tasks"
JINJA_ENVIRONMENT = ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
)


@dataclass
class DatasetSpec:
    """How the rows of one data set become prompts. `prompt`, `reference` and `prefix` are Jinja templates over a row's
    fields; `id`, `turns` and `domain_from` are Jinja expressions."""

    name: str
    version: int
    about: str = ""
    """What the data set is and who made it."""
    bundled: str = ""
    """File below assets/prompts."""
    hub: str = ""
    """Hugging Face data set, read when there is no local file."""
    config: str | None = None
    split: str = "test"
    revision: str | None = None
    id: str = "id"
    prompt: str = "{{ prompt }}"
    chat_prompt: str = ""
    """The prompt for a target with a chat template; empty: `prompt`."""
    turns: str = ""
    """The user's messages of a chat, in order; empty: there is only the prompt."""
    domain: str = ""
    domain_from: str = ""
    """The domain of each row, where rows have different ones."""
    stop: list[str] = field(default_factory=list)
    """Texts that end an answer, besides EOS and the run's max_new_tokens, for a target without a chat template; a chat
    model ends its turns with EOS."""
    metric: str = ""
    """number (the last one of an answer), rouge-l, code (whether it passes its tests), json (whether it is JSON), or
    empty for no score."""
    metrics: dict[str, str] = field(default_factory=dict)
    """{domain: metric} where domains have different ones."""
    reference: str = ""
    prefix: str = ""
    placeholder: str = ""
    """What stands in rows whose text was left out; such a row is refused."""

    def data_path(self, task: str, path: str) -> Path | None:
        """The file or folder that holds the rows: `path`, or the bundled one; None if `path` is a name on the Hub.

        UserError if there is nothing there.
        """
        file = Path(path) if path else BUNDLED_PROMPTS / self.bundled
        if file.exists():
            return file
        if is_local(path, "dataset") or "/" not in path:
            raise UserError(f"task {task!r}: no file {file}: correct its path")
        return None


CUSTOM_DATASET = DatasetSpec("own", 1, prompt="", turns="turns", domain_from="domain")
"""The spec of files that have none of their own."""


@cache
def load_dataset_specs() -> dict[str, DatasetSpec]:
    """{name: spec} of every file in assets/tasks. UserError as in `read_dataset_spec`."""
    specs = map(read_dataset_spec, sorted(DATASET_SPECS_DIR.glob("*.yaml")))
    return {spec.name: spec for spec in specs}


def read_dataset_spec(file: Path) -> DatasetSpec:
    """The spec in a YAML file. UserError for unknown, missing or mistyped fields and for bad Jinja."""
    values = read_yaml(file)
    known = {f.name for f in fields(DatasetSpec)} - {"name"}
    if not set(values) <= known or "version" not in values:
        unknown = ", ".join(sorted(set(values) - known)) or "no version"
        raise UserError(f"{file}: {unknown}; fields are {', '.join(sorted(known))}")
    for name, value in values.items():
        kind = {"version": int, "stop": list, "metrics": dict}.get(name, str)
        if not isinstance(value, kind) and not (value is None and name in ("config", "revision")):
            raise UserError(f"{file}: {name} is {value!r:.40}: it must be of type {kind.__name__}")
    spec = DatasetSpec(name=file.stem, **values)
    try:
        for template in (spec.prompt, spec.chat_prompt, spec.reference, spec.prefix):
            JINJA_ENVIRONMENT.from_string(template)
        for expression in (spec.id, spec.turns, spec.domain_from):
            if expression:
                JINJA_ENVIRONMENT.compile_expression(expression)
    except jinja2.TemplateError as error:
        raise UserError(f"{file}: bad Jinja ({one_line(error)}): correct it") from error
    return spec


def find_dataset_spec(kind: str) -> DatasetSpec:
    return load_dataset_specs().get(kind, CUSTOM_DATASET)


def evaluate_expression(expression: str, row: DatasetRow) -> Any:
    """The value of a Jinja expression over the row's fields; None for a missing field or an empty expression."""
    if not expression:
        return None
    try:
        return JINJA_ENVIRONMENT.compile_expression(expression)(row.fields)
    except jinja2.UndefinedError:
        return None
    except Exception as error:  # values of any type may stand where a text is expected
        raise _row_error(row, error) from error


def render_template(template: str, row: DatasetRow) -> str:
    """The template filled in. UserError for a field that the row does not have."""
    try:
        return JINJA_ENVIRONMENT.from_string(template).render(row.fields)
    except Exception as error:
        raise _row_error(row, error) from error


def _row_error(row: DatasetRow, error: Exception) -> UserError:
    return UserError(f"{row.location}: {one_line(error)}: is it a file of this task?")


def load_rows(task: str, path: str, spec: DatasetSpec, limit: int) -> list[DatasetRow]:
    """The first `limit` rows (0: all) of the task's file, or of the spec's Hub data set. UserError for none."""
    if not path and not spec.bundled:
        if not spec.hub:
            known = [x.name for x in load_dataset_specs().values() if x.bundled or x.hub]
            raise UserError(f"task {task!r} needs a path; known without one: {', '.join(known)}")
        rows = _read_hub(task, spec, spec.hub)
    else:
        found = spec.data_path(task, path)
        rows = _read_hub(task, spec, path) if found is None else read_rows(found, spec.split)
    taken = list(islice(rows, limit or None))
    if len(taken) == 0:
        raise UserError(f"{path or spec.name} holds no prompts")
    for row in taken:
        if row.error:
            raise UserError(row.error)
    return taken


def _read_hub(task: str, spec: DatasetSpec, name: str) -> Iterator[DatasetRow]:
    """The rows of the spec's own data set, or of the user's, which has one configuration."""
    config, revision = (spec.config, spec.revision) if name == spec.hub else (None, None)
    try:
        yield from read_hub_rows(name, config, spec.split, revision)
    except UserError as error:
        raise UserError(f"task {task!r}: {error}, or give its file as `path`") from error
