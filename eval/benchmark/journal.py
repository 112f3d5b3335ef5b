"""What a run has measured, line by line on disk, so that one that is stopped goes on where it was."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decode.common.errors import UserError


class Journal:
    """An append-only file of {key, value} lines. A key is a list of plain values; a value is anything JSON holds.

    Every line is flushed whole, so a run that is killed loses only what it was doing. Its last line may be torn: it is
    dropped, and so is nothing else. The first line says what the machine is, since a report must not mix two.
    """

    def __init__(self, path: Path, machine: dict[str, Any]):
        self.path = path
        self.found: dict[str, Any] = {}
        self.num_resumed = 0
        """Entries of an earlier, interrupted run."""
        if path.exists():
            self._read()
        if not self.found:
            self.put(["machine"], machine)
        elif self.get(["machine"]) != machine:
            raise UserError(
                f"{path} was measured on {self.get(['machine'])}, this is {machine}: one report is of one machine; "
                "--overwrite true begins anew, --out names another folder"
            )

    def get(self, key: list[Any]) -> Any:
        """The value of `key`, None if it was not measured yet."""
        return self.found.get(json.dumps(key))

    def put(self, key: list[Any], value: Any) -> None:
        """Keeps `value`, on disk before this returns."""
        line = json.dumps({"key": key, "value": value})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.found[json.dumps(key)] = json.loads(line)["value"]

    def once(self, key: list[Any], measure: Callable[[], Any]) -> Any:
        """The value of `key`, measured now if there is none. It has been through JSON: tuples are lists."""
        if self.get(key) is None:
            self.put(key, measure())
        return self.get(key)

    def _read(self) -> None:
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the writer was killed in the midst of a line
            self.path.write_text(whole, encoding="utf-8")
        for number, line in enumerate(whole.split("\n")[:-1], 1):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                self.found[json.dumps(row["key"])] = row["value"]
                continue
            raise UserError(f"{self.path}:{number} is damaged: --overwrite true begins anew")
        self.num_resumed = max(0, len(self.found) - 1)
