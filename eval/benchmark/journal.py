"""The journal of an evaluation: of which target and drafts its measurements are."""

from collections.abc import Mapping

from decode.common.journal import Journal
from decode.common.run_dir import RunFolder, refuse_change
from decode.common.target_record import ModelFingerprint, difference
from decode.common.typed_json import from_json, to_json

TARGETS, DRAFTS = ["target"], ["drafts"]
"""Keys of what was measured: the targets, the last one that of now, and the checksums of drafts."""


def open_journal(
    run: RunFolder, target: ModelFingerprint, drafts: Mapping[str, str | None], allow_changed: bool
) -> Journal:
    """The journal of the run; `drafts` are the checksums of their weights by name.

    UserError if target or drafts are others than when it began, unless `allow_changed`.
    """
    journal = run.journal()
    targets = journal.get(TARGETS) or ([{}] if journal.num_resumed else [to_json(target)])
    found = difference(from_json(ModelFingerprint, targets[-1]), target)
    if found:
        refuse_change(f"{run.path} was measured with another target ({found})", allow_changed)
    if to_json(target) not in targets:
        targets = [*targets, to_json(target)]
    then = journal.get(DRAFTS) or dict(drafts)
    changed = [name for name in drafts if then.get(name) != drafts[name]]
    if changed:
        what = f"{run.path} was measured with other weights of {', '.join(changed)}"
        refuse_change(what, allow_changed)
    for key, value in ((TARGETS, targets), (DRAFTS, dict(drafts))):
        if journal.get(key) != value:
            journal.put(key, value)
    return journal


def earlier_targets(journal: Journal) -> list[ModelFingerprint]:
    """The other targets that measurements in it may be of, because `allow_changed` was set; one without a name may be
    empty."""
    return [from_json(ModelFingerprint, x) for x in (journal.get(TARGETS) or [])[:-1]]
