"""How rounds run: eagerly, compiled or as CUDA graphs; what each way is for, and which one is fastest."""

import sys
from collections.abc import Sequence

from torch.utils._triton import has_triton

from decode.drafts.base import Draft
from decode.model.loading import Target

MODES = ("eager", "captured", "compiled", "graph")
"""Names for the `mode` of an engine."""
COMPILED, CAPTURED = ("compiled", "graph"), ("captured", "graph")
"""Modes that run inductor's kernels, and modes that replay a round as one CUDA graph."""


def mode_refusal(mode: str, target: Target, draft: Draft | None) -> str | None:
    """Why this target and draft do not run in `mode`, in one line; None: they do."""
    if mode != "eager" and not target.runner.can_compile:
        return (
            f"mode {mode} is for causal targets with attention alone on one device: choose eager for target "
            f"{target.name!r}"
        )
    on_host = draft is not None and draft.runs != "device"
    if mode in CAPTURED and (target.runner.device.type != "cuda" or on_host):
        return f"mode {mode} needs a CUDA device and a draft that proposes on it"
    if mode != "eager" and draft is not None and draft.runs == "pass":
        return f"draft {draft.name!r} acts in the middle of the target's pass: choose mode eager"
    return None


def pick_mode(
    mode: str,
    target: Target,
    drafts: Sequence[Draft | None],
    on_host: str = "",
    compiles: bool = True,
) -> str:
    """`mode`, but for `auto`: the fastest that the target and all drafts (None: plain decoding) allow.

    On a GPU that is graph, captured where torch has no Triton to compile with or where the work is too short for that
    (not `compiles`), and eager where the host takes part in rounds, by a draft or by what `on_host` names; one line on
    stderr says which. On a CPU it is eager.
    """
    if mode != "auto":
        return mode
    if target.runner.device.type != "cuda":
        return "eager"
    mode = "graph" if compiles and has_triton() else "captured"
    refused = [draft for draft in drafts if mode_refusal(mode, target, draft)]
    why = ", since torch has no Triton here" if compiles and mode == "captured" else ""
    if on_host or refused:
        names = [draft.name for draft in refused if draft is not None] + [on_host] * bool(on_host)
        mode, why = "eager", f", since the host takes part in rounds of {', '.join(names)}"
        if not target.runner.can_compile:
            why = (
                f", since target {target.name!r} has more than attention, or is on several devices"
            )
    sys.stderr.write(f"mode auto: {mode}{why}\n")
    return mode
