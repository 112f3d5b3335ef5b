"""Measures drafts: acceptance, speed-up, losslessness, and what to do about the result."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eval.measuring import Measurement

__all__ = ["measure"]


def measure(**settings: Any) -> "Measurement | None":
    """Measures drafts beside plain decoding as eval/run.py does, whose settings these are:

        measure(target="assets/target", methods=["ngram", {"name": "causal", "draft": "outputs/draft"}])

    The report lies in the folder `out`; with the same settings a stopped measurement goes on, and one that is done is
    read. What is returned prints as a table, draws itself in a notebook, and has `report` and `folder`. UserError for
    bad settings or inputs.
    """
    from decode.common.command import called
    from eval.settings.evaluation import EvalConfig

    with called(EvalConfig, settings) as s:
        from eval import measuring  # loads torch, which reads what was prepared

        return measuring.measure(s)
