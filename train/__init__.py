"""Training of drafts by distillation from the target.

    from train import distill, sample

    samples = sample(target="assets/target", out="samples", max_new_tokens=64)
    draft = distill(target="assets/target", data=samples.folder, draft={"init": "assets/draft"}, out="draft")

The settings are those of train/sample.py and train/distill.py, whose --help_all explains them: groups are dicts, and
`config` is a YAML file that the others stand above. What the functions raise for bad settings and inputs is UserError;
torch is loaded when one is called.
train/sample.py and train/distill.py are scripts: whoever imports one as a module has it in the function's place.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.answering import SampledSet
    from train.training import Distilled, DryRun

__all__ = ["distill", "sample"]


def sample(**settings: Any) -> "SampledSet | None":
    """Writes the target's answers to prompts into the folder `out`, or goes on where an earlier start stopped, as
    train/sample.py does.

    What is returned prints as a table and has `folder` and `counts`; it is None in a process of several that is not
    the first.
    """
    from decode.common.command import called
    from train.sampling.config import SampleConfig

    with called(SampleConfig, settings) as s:
        from train.answering import answer  # loads torch, which reads what was prepared

        return answer(s)


def distill(**settings: Any) -> "Distilled | DryRun | None":
    """Trains a draft on the sampled set `data` and writes it into the folder `out`, or goes on where an earlier start
    stopped, as train/distill.py does.

    What is returned prints as the table of the log, draws its curves in a notebook, and has `folder`, `steps`,
    `measured` (accept/tau: tokens per round, accept/alpha) and `log`. With `dry_run` it is a DryRun, and None in a
    process of several that is not the first.
    """
    from decode.common.command import called
    from train.trainer.settings import DistillConfig

    with called(DistillConfig, settings) as s:
        from train.training import train_draft

        return train_draft(s)
