"""Grid and random sweeps over the settings of a command: training by default, or evaluation, sampling, decoding.

    python scripts/sweep.py --recipe configs/bundled/causal.yaml --grid '{loop.lr: [1e-4, 3e-4, 1e-3], seed: [0, 1, 2]}'
    python scripts/sweep.py --recipe R.yaml --random '{loop.lr: {low: 1e-5, high: 1e-2, scale: log}}' --draws 16
    python scripts/sweep.py --config configs/sweep/learning_rate.yaml \\
      --launch '[CUDA_VISIBLE_DEVICES=0, CUDA_VISIBLE_DEVICES=1]'
    python scripts/sweep.py --command eval/run.py --recipe E.yaml --grid '{k: [2, 3, 4]}' --result stdout \\
      --metric best.0.speedup

Settings are those of the command's own command line, and all trials are checked before the first one starts. Each
trial is a process with a folder of its own, OUT/trials/NAME (out/, stdout.txt, stderr.txt). Machines that see OUT under
the same path share the work if each runs the same command.

Stopped or killed, the same command goes on: finished trials are kept, others resume, failed ones are tried again. More
values or draws add trials to a finished sweep. OUT receives sweep.md, sweep.json and, if one number is swept,
sweep.svg: the settings that vary and the metric, with mean ± standard deviation over the values of a setting `seed`,
and the difference from the best row, paired by seed, with its interval.
The last line on stdout is JSON. For `wandb agent` see configs/sweep/wandb.yaml.
"""

import json
import shlex
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console

from decode.common import files, lock, run_dir
from decode.common.command import Terminated, run_command
from decode.common.errors import UserError
from decode.common.settings import to_yaml
from scripts.lab.sweep_plan import SweepConfig, plan_trials
from scripts.lab.sweep_pool import TrialPool, check_launch

COMMAND = "scripts/sweep.py"


def main(s: SweepConfig) -> None:
    """Runs what is missing and writes the table. UserError at the end if trials failed."""
    # This loads matplotlib: --help does without.
    from scripts.lab.sweep_results import collect_results, write_results

    out = Path(s.out)
    run_dir.check_folder(out)
    trials = plan_trials(s)
    check_launch(s)
    run_dir.check_command(out, s, COMMAND)
    if s.dry_run:
        for trial in trials:
            print(shlex.join(["python", s.command, *trial.words]))
        return
    out.mkdir(parents=True, exist_ok=True)
    with lock.hold(out / lock.LOCK_FILE, out, wait=True):
        text = f"{files.COMMAND_HEADER}{COMMAND}\n{to_yaml(s)}"
        files.write_atomically(out / files.RUN_FILE, text)
    try:
        TrialPool(s, trials, Console(stderr=True)).run()
    except (KeyboardInterrupt, Terminated) as error:
        error.add_note(f"finished trials are kept in {out}, and the same command goes on")
        raise
    with lock.hold(out / lock.LOCK_FILE, out, wait=True):
        rows, failed = collect_results(s, trials)
        print(write_results(s, rows, failed))
    shown = {key: vars(rows[0])[key] for key in ("settings", "metric", "spread", "outputs")}
    print(json.dumps({"sweep": str(out / "sweep.json"), "best": shown, "failed": len(failed)}))
    if failed:
        name, why = next(iter(failed.items()))
        raise UserError(
            f"{len(failed)} of {len(trials)} trials have no result, such as {name}: {why}; the same command tries "
            "failed ones again"
        )


if __name__ == "__main__":
    run_command(main, SweepConfig, __doc__)
