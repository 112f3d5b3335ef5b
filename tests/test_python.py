"""What the commands do, called from Python: settings, results, signals, and torch only where it is needed."""

import html
import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import decode
import train
from decode.common.errors import UserError
from decode.continuation import Answer
from decode.drafts.settings import LoadingSettings
from decode.engine.records import DecodeRecord
from decode.model import loading
from eval import measure
from tests import worlds
from tests.tiny import tiny_model, tiny_target
from tests.worlds import ENV, ROOT, World, byte_tokenizer
from train.training import Distilled

IMPORTS = """
import sys
import decode, eval, train
for call in (train.sample, train.distill, eval.measure):
    try:
        call(no_such_setting=1)
    except decode.UserError as error:
        print(error)
print("torch" in sys.modules)
"""


def test_importing_and_wrong_settings_load_no_torch() -> None:
    """Catches seconds that an import takes, and that a wrong name takes to be told."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=ROOT, env={**os.environ, **ENV}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    *errors, torch = done.stdout.splitlines()
    assert errors == ["there is no setting no_such_setting (--help_all lists all of them)"] * 3
    assert torch == "False"


WRONG = {
    "loop.steps is 'many': give a whole number": lambda: train.distill(loop={"steps": "many"}),
    "loop.lr is -1.0: it must be above 0": lambda: train.distill(loop={"lr": -1}),
    "did you mean 'loop.lr'?": lambda: train.distill(learning_rate=1e-4),
    "draft.heads is a setting of": lambda: train.distill(draft={"family": "causal", "heads": 3}),
    "sources[0].limit is 'x'": lambda: train.sample(sources=[{"kind": "bundled", "limit": "x"}]),
    "none.yaml does not exist": lambda: measure(config="none.yaml"),
    "dtype 'float99': choose among": lambda: decode.load_target("assets/target", dtype="float99"),
    "target 'assets/none'": lambda: decode.load_target("assets/none"),
}


@pytest.fixture
def _functions() -> None:
    """train's functions, in whose place another test may have imported the scripts as modules."""
    importlib.reload(train)


@pytest.mark.usefixtures("_functions")
@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_setting_is_an_exception_that_names_it(said: str) -> None:
    """Catches a function that prints and exits, as its command does, and a setting that is passed over."""
    with pytest.raises(UserError) as error:
        WRONG[said]()
    assert said in str(error.value)


TINY = """
import json, os, signal, sys, threading
from pathlib import Path

from decode import load_draft, load_target, speculate
from decode.common.command import called
from decode.drafts.settings import DecodingSettings
from eval import measure
from train import distill, sample
from train.settings.training import LoopConfig

world, out = Path(sys.argv[1]), Path(sys.argv[2])
name = str(world / "target")
handler = signal.getsignal(signal.SIGINT)
samples = sample(target=name, sources=[{"kind": "file", "path": world / "prompts.jsonl"}],
                 max_new_tokens=8, mode="eager", out=out / "samples")
again = sample(config=out / "samples/run.yaml")
loop = {"steps": 2, "batch_size": 4, "micro_batch": 4, "warmup": 0, "eval_every": 1, "log_every": 1}
common = {"target": name, "data": samples.folder, "draft": {"init": world / "draft"}, "tracker": "none"}
common["check"] = {"prompts": 3, "max_new_tokens": 4}

drafts = [distill(**common, loop=loop, out=out / "one")]
second = dict(common, loop=LoopConfig(**loop), mixed_precision="bf16", out=out / "two")
thread = threading.Thread(target=lambda: drafts.append(distill(**second)))
thread.start()
thread.join()
tried = distill(**common, loop=loop, dry_run=True, out=out / "three")
target = load_target(name)
plain = speculate(target, None, "zq abc", max_new_tokens=24)
ids = target.tokenizer("zq abc")["input_ids"]
answers = [speculate(target, load_draft(x.folder, target), ids, k=3, max_new_tokens=24) for x in drafts]
measured = measure(target=name, methods=["ngram", {"name": "causal", "draft": drafts[0].folder}],
                   tasks=[{"name": "prose", "limit": 1}], temperatures=[0.0], max_new_tokens=4,
                   phase_prompts=0, out=out / "report")
interrupted = 0
try:
    with called(DecodingSettings, {}):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            interrupted += 1
            os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    interrupted += 1
print(json.dumps({
    "counts": [samples.counts, again.counts], "steps": [draft.steps for draft in drafts],
    "tau": [draft.measured["accept/tau"] for draft in drafts], "tried": sorted(tried.measured),
    "texts": [plain.text, *(answer.text for answer in answers)], "log": len(drafts[0].log),
    "argv": measured.report.argv,
    "methods": [m.name for m in measured.report.pooled], "prints": [*map(str, (samples, drafts[0], measured))],
    "draws": [x._repr_html_() for x in (samples, drafts[0], answers[0], measured)],
    "interrupted": interrupted, "restored": signal.getsignal(signal.SIGINT) is handler,
}))
"""


@pytest.mark.slow
def test_all_steps_run_in_one_process_and_twice(world: World, tmp_path: Path) -> None:
    """Catches a second training that the first one's precision ends, one in a thread that may set no signals, a
    command's module in the place of its function, a result that goes to stdout, a notebook's own command line taken
    for ours, and a notebook that a second Ctrl-C ends."""
    file = tmp_path / "tiny.py"
    file.write_text(TINY)
    done = worlds.fork(file, world.target.parent, tmp_path).ok()
    (line,) = done.out.splitlines()
    found = json.loads(line)
    first, second = found["counts"]
    assert first == second
    assert first["asked"] == len(world.texts)
    assert found["steps"] == [2, 2]
    assert all(1 <= tau <= 5 for tau in found["tau"])
    assert not (tmp_path / "three").exists()
    assert found["tried"]
    assert len(set(found["texts"])) == 1
    assert len(found["texts"][0]) > 5
    assert found["argv"] == []
    assert sorted(found["methods"]) == [
        "causal",
        "ngram",
        "plain",
    ]
    counts, log, table = found["prints"]
    assert f"asked  {len(world.texts)}" in re.sub(" +", "  ", counts)
    assert [row.split()[0] for row in log.splitlines()[2:]] == ["1", "2"]
    assert "speed-up" in table
    samples, draft, answer, report = found["draws"]
    assert samples.startswith("<table>")
    assert draft.count("<svg") == 2
    assert 'srcdoc="&lt;!DOCTYPE html&gt;' in report
    assert "drafted tokens accepted" in answer
    assert (found["interrupted"], found["restored"]) == (2, True)


def answered(prompt: str, text: str, **more: object) -> Answer:
    tokenizer = byte_tokenizer()
    target = replace(tiny_target(tiny_model("llama")), tokenizer=tokenizer)
    prompt_ids, ids = (tokenizer(x, add_special_tokens=False)["input_ids"] for x in (prompt, text))
    return Answer(prompt, target, DecodeRecord(prompt_ids, ids, **more), 2.0)  # type: ignore[arg-type]


def test_an_answer_shows_where_its_text_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a model's text that is taken for HTML or for rich's markup, colours in a file, and forced tokens that are
    counted as the target's."""
    answer = answered("<p>[b]", "a<b>é[c]", rounds=[(3, 2), (1, 0), (2, 2)], forced=[0, 1, 0])
    assert answer.text == "a<b>é[c]"
    assert answer.tau == 8 / 3
    kinds = [(one.text, one.kind) for one in answer.segments]
    own, accepted = "own", "accepted"
    assert kinds == [
        ("a", own), ("<b", accepted), (">", own), ("é", own), ("[c", accepted), ("]", own),
    ]  # fmt: skip
    page = answer._repr_html_()
    shown = html.unescape(re.sub(r"<sub.*?</sub>|<[^>]*>", "", page.partition("</pre>")[0]))
    assert shown == "<p>[b]a<b>é[c]"
    assert "−1</sub>" in page
    assert str(answer).splitlines()[0] == "<p>[b]a<b>é[c]"
    assert "τ 2.67" in str(answer)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[32m<b\x1b[0m" in str(answer)


def test_a_long_training_fits_a_page(tmp_path: Path) -> None:
    """Catches hundreds of rows, a last step that is left out, an empty chart, and two lines of one step in two rows."""
    lines = [{"step": step, "train/loss": 1 / step} for step in range(1, 301)]
    lines.append({"step": 300, "accept/alpha": 0.5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draft = Distilled(str(tmp_path), 300, {})
    rows = draft.table.rows
    assert 10 < len(rows) <= 20
    assert rows[-1] == ["300", "0.003", "0.500", "–"]
    assert draft._repr_html_().count("<svg") == 1


def test_an_answer_without_a_round_has_no_tau() -> None:
    """Catches a division by zero."""
    answer = answered("a", "b", finish_reason="eos")
    assert answer.tau is None
    assert "0 rounds" in str(answer)


@pytest.mark.slow
def test_bundled_models_load_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a snippet that works in a checkout alone."""
    monkeypatch.chdir(tmp_path)
    target = decode.load_target("assets/target")
    draft = decode.load_draft("assets/draft", target)
    assert draft is not None
    assert target.describe().name == "assets/target"
    assert decode.speculate(target, draft, "import os\n", k=2, max_new_tokens=4).record.rounds
    assert loading.usual_dtype(target.name, "cpu") == target.dtype
    assert LoadingSettings().dtype == "auto"
