"""The journal of a run: every finished measurement, line by line on disk, so that a stopped run goes on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decode.common import damage
from decode.common.errors import UserError, naming

HEADER = ["machine", 2]
"""Key of the first line, whose value is the machine; the number is the version of the values' format."""


class Journal:
    """An append-only file of {key, value} lines. A key is a list of plain values; a value is anything JSON holds.

    Every line is flushed whole, so a run that is killed loses only the measurement in progress. Damaged lines are
    dropped with a warning and measured again. The first line names the machine, since a report must not mix two; if it
    is damaged, everything is measured again. UserError for a journal of another machine or of an earlier version.
    """

    def __init__(self, path: Path, machine: dict[str, Any]):
        self.path = path
        consequence = "what they held is measured again"
        rows = damage.read_log(path, {"key": list, "value": object}, consequence, needs_first=True)
        self._values = {json.dumps(row["key"]): row["value"] for row in rows}
        self.num_resumed = self.measured
        """Entries of an earlier, interrupted run."""
        if not self._values:
            self.put(HEADER, machine)
        elif self.get(HEADER) is None:
            raise UserError(
                f"{path} was written by an earlier version: --overwrite true begins anew"
            )
        elif self.get(HEADER) != machine:
            raise UserError(
                f"{path} was measured on {self.get(HEADER)}, this is {machine}: one report is of one machine; "
                "--overwrite true begins anew, --out names another folder"
            )

    @property
    def measured(self) -> int:
        """Entries without the first, which names the machine."""
        return max(0, len(self._values) - 1)

    def get(self, key: list[Any]) -> Any:
        return self._values.get(json.dumps(key))

    def put(self, key: list[Any], value: Any) -> None:
        """Keeps `value`; it is on disk before this returns."""
        line = json.dumps({"key": key, "value": value})
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._values[json.dumps(key)] = json.loads(line)["value"]

    def get_or_measure(self, key: list[Any], measure: Callable[[], Any]) -> Any:
        """The value of `key`, measured and kept if there is none. It has been through JSON: tuples are lists."""
        if self.get(key) is None:
            self.put(key, measure())
        return self.get(key)
