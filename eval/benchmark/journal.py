"""The journal of a run: every finished measurement, line by line on disk, so that a stopped run goes on."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from decode.common import damage, provenance, run_dir
from decode.common.disk_errors import naming
from decode.common.errors import UserError
from decode.model.fingerprint import ModelFingerprint, difference

TARGETS, DRAFTS = ["target"], ["drafts"]
"""Keys of what was measured: the targets, the last one that of now, and the checksums of drafts."""
HEADER = ["machine", 2]
"""Key of the first line, whose value is the machine; the number is the version of the values' format."""


class Journal:
    """An append-only file of {key, value} lines. A key is a list of plain values; a value is anything JSON holds.

    Every line is flushed whole, so a run that is killed loses only the measurement in progress. Damaged lines are
    dropped with a warning (`damage.read_log`) and measured again. The first line names the machine, since a report must
    not mix two; if it is damaged, everything is measured again. UserError for a journal of another machine or of an
    earlier version.
    """

    def __init__(self, path: Path, machine: dict[str, Any]):
        self.path = path
        consequence = "what they held is measured again"
        rows = damage.read_log(path, {"key": list, "value": object}, consequence, needs_first=True)
        self._values = {json.dumps(row["key"]): row["value"] for row in rows}
        self.num_resumed = max(0, len(self._values) - 1)
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

    def get(self, key: list[Any]) -> Any:
        """The value of `key`, None if it was not measured yet."""
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


def open_journal(
    out: Path, target: ModelFingerprint, drafts: Mapping[str, str | None], allow_changed: bool
) -> Journal:
    """The journal of the run in this folder; `drafts` are the checksums of their weights by name.

    UserError if target or drafts are others than when it began, unless `allow_changed`.
    """
    journal = Journal(out / "journal.jsonl", provenance.hardware())
    targets = journal.get(TARGETS) or ([{}] if journal.num_resumed else [target.to_json()])
    found = difference(ModelFingerprint.from_json(targets[-1]), target)
    if found:
        run_dir.refuse_change(f"{out} was measured with another target ({found})", allow_changed)
    if target.to_json() not in targets:
        targets = [*targets, target.to_json()]
    then = journal.get(DRAFTS) or dict(drafts)
    changed = [name for name in drafts if then.get(name) != drafts[name]]
    if changed:
        what = f"{out} was measured with other weights of {', '.join(changed)}"
        run_dir.refuse_change(what, allow_changed)
    for key, value in ((TARGETS, targets), (DRAFTS, dict(drafts))):
        if journal.get(key) != value:
            journal.put(key, value)
    return journal


def earlier_targets(journal: Journal) -> list[dict[str, str]]:
    """The other targets that measurements in it may be of, because `allow_changed` was set; {}: one without a name."""
    targets: list[dict[str, str]] = journal.get(TARGETS) or []
    return targets[:-1]
