"""The served check of llama.cpp: what it makes of answers; and, where llama-server is built, the answers themselves."""

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.checkpoints import draft_vocab
from decode.common.errors import UserError
from decode.model.loading import load_target
from decode.serving.log_counts import RequestCounts
from decode.serving.running.llama_server import ServedAnswer
from eval.served.llamacpp import run_ours, served_rounds
from eval.served.parity import load_prompts
from eval.settings.evaluation import Task
from eval.settings.served import LlamaCppParityConfig
from scripts import llamacpp_parity
from tests.worlds import ROOT

STAND_IN = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

if "--version" in sys.argv:
    raise SystemExit("version: 9.9")
folder = Path(__file__).parent
(folder / "asked").write_text(json.dumps(sys.argv[1:]))
for flag in ("-m", "-md"):
    assert Path(sys.argv[sys.argv.index(flag) + 1]).read_bytes()[:4] == b"GGUF"
answers = iter(json.loads((folder / "answers.json").read_text()))
totals = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
positions = {}

class Handler(BaseHTTPRequestHandler):
    def reply(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        lines = [f"llamacpp:spec_decode_num_{key}_total {n}" for key, n in totals.items()]
        name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{position="{at}"}} {n}' for at, n in positions.items()]
        self.reply("\\n".join(lines) + "\\n")

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["temperature"] == 0 and not request["cache_prompt"]
        answer = next(answers)
        rounds = [pair for pair in answer["rounds"] if pair[0]]
        drafted, accepted = (sum(pair[i] for pair in rounds) for i in (0, 1))
        for key, n in zip(totals, (len(rounds), drafted, accepted)):
            totals[key] += n
        for _, n in rounds:
            for at in range(n):
                positions[at] = positions.get(at, 0) + 1
        timings = {"predicted_n": len(answer["tokens"]), "draft_n": drafted, "draft_n_accepted": accepted}
        timings |= answer.get("timings", {})
        self.reply(json.dumps({"tokens": answer["tokens"], "timings": timings}))

    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""

Answers = list[dict[str, Any]]


def asked(**changes: Any) -> LlamaCppParityConfig:
    tasks = [Task("code", limit=2)]
    base: dict[str, Any] = {"draft": str(ROOT / "assets/draft"), "target": str(ROOT / "assets/target")}  # fmt: skip
    return LlamaCppParityConfig(**(base | {"tasks": tasks, "k": 3, "max_new_tokens": 9} | changes))


@pytest.fixture(scope="module")
def mine() -> Answers:
    """What llama.cpp would answer if it decodes as we do; the second text ends before the limit."""
    s = asked()
    target = replace(load_target(s.target, "cpu"), eos=frozenset())
    served = [ServedAnswer({"tokens": [0] * n}, RequestCounts(0, 0, 0)) for n in (9, 6)]
    answers = run_ours(s, target, load_prompts(s.tasks, 2, target), served)
    return [{"tokens": own.output_ids, "rounds": own.rounds} for own in answers]


def stand_in(folder: Path, answers: Answers) -> str:
    """A llama-server that gives these answers, one after the other, and notes how it was started."""
    (folder / "answers.json").write_text(json.dumps(answers))
    script = folder / "llama-server"
    script.write_text(f"#!{sys.executable}\n{STAND_IN}")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def test_equal_answers_agree(
    mine: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a check that never agrees, a server that is asked for other drafts, and figures of one side alone."""
    llamacpp_parity.main(asked(server=stand_in(tmp_path, mine)))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["same"], result["prompts"], result["differ"]) == (2, 2, [])
    assert result["llamacpp"] == "version: 9.9"
    assert result["totals"]["ours"] == result["totals"]["llamacpp"]
    rounds = [pair for answer in mine for pair in answer["rounds"]]
    assert result["totals"]["ours"]["drafted"] == sum(drafted for drafted, _ in rounds) > 0
    command = json.loads((tmp_path / "asked").read_text())
    for flag, value in (
        ("--spec-draft-n-max", "3"),
        ("--spec-type", "draft-simple"),
        ("-ctk", "f32"),
    ):
        assert command[command.index(flag) + 1] == value
    assert result["figures"]["ours"] == result["figures"]["llamacpp"]
    assert result["difference_of_tau"]["difference"] == 0


@pytest.mark.parametrize("change", ["token", "accepted", "drafted", "round"])
def test_a_difference_ends_with_1(
    change: str, mine: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a difference in tokens, rounds, drafted or accepted counts that passes: each alone must not."""
    other = json.loads(json.dumps(mine))
    first = other[0]
    if change == "token":
        first["tokens"][4] ^= 1
    elif change == "accepted":
        first["rounds"][0][1] = 0 if first["rounds"][0][1] else 1
    elif change == "drafted":
        first["rounds"][0][0] += 1
    else:
        first["rounds"].append([3, 0])
    with pytest.raises(SystemExit) as end:
        llamacpp_parity.main(asked(server=stand_in(tmp_path, other), margin=0.0))
    assert end.value.code == 1
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["differ"]) == 1


def test_what_cannot_be_compared_is_refused(mine: Answers, tmp_path: Path) -> None:
    """Catches counters that mean something else, and a server that is missing."""
    wrong = [mine[0] | {"timings": {"draft_n": 1, "draft_n_accepted": 1}}]
    with pytest.raises(UserError, match="response has 1 drafted and 1 accepted tokens"):
        llamacpp_parity.main(asked(server=stand_in(tmp_path, wrong)))
    with pytest.raises(UserError, match="set LLAMA_SERVER"):
        llamacpp_parity.main(asked(server=str(tmp_path / "nowhere")))


def test_a_reduced_vocabulary_is_the_same_on_both_sides(
    mine: Answers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches our drafts from the whole LM head: what is served has one row for all tokens that were not trained."""
    draft = tmp_path / "draft"
    draft.mkdir()
    for file in (ROOT / "assets/draft").iterdir():
        (draft / file.name).symlink_to(file)
    (draft / draft_vocab.VOCAB_FILE).write_text('{"ids": [1, 5, 9]}')
    missed = [
        answer | {"rounds": greedy_rounds([False] * 9, 3, len(answer["tokens"]), 9)}
        for answer in mine
    ]
    assert sum(accepted for answer in mine for _, accepted in answer["rounds"]) > 0
    llamacpp_parity.main(asked(server=stand_in(tmp_path, missed), draft=str(draft)))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["same"], result["reduced_vocabulary"]) == (2, True)
    with pytest.raises(SystemExit):  # as all tokens were drafted
        llamacpp_parity.main(asked(server=stand_in(tmp_path, mine), draft=str(draft), margin=0.0))


def greedy_rounds(
    agree: list[bool], k: int, tokens: int, limit: int, ended: bool = False
) -> list[tuple[int, int]]:
    """Rounds of greedy decoding where the draft agrees at places `agree`, up to `tokens` tokens, never past `limit`.

    If the text has `ended`, its last token ends a chain unaccepted where more drafts follow it."""
    rounds, emitted = [], 1
    while emitted < tokens:
        drafts = min(k, limit - emitted - 1)
        accepted = 0
        while accepted < drafts and agree[emitted + accepted]:
            last = emitted + accepted == tokens - 1
            if ended and last and accepted + 1 < drafts:
                break
            accepted += 1
        rounds.append((drafts, accepted))
        emitted += accepted + 1
    return rounds


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.booleans(), min_size=40, max_size=40), st.integers(1, 5), st.integers(2, 20),
    st.integers(1, 20),
)  # fmt: skip
def test_rounds_are_cut_as_the_server_runs_them(
    agree: list[bool], k: int, limit: int, tokens: int
) -> None:
    """Catches a last round with drafts that would not fit, rounds behind the end of a text, and an end that the draft
    proposed counted as accepted."""
    tokens = min(tokens, limit)
    ours = greedy_rounds(agree, k, limit, 10**6)
    served = greedy_rounds(agree, k, tokens, limit, ended=tokens < limit)
    assert served_rounds(ours, tokens, limit) == served


SERVER = os.environ.get("LLAMA_SERVER", "")


@pytest.mark.slow
@pytest.mark.skipif(not SERVER, reason="LLAMA_SERVER names no llama-server")
def test_llamacpp_accepts_what_we_accept() -> None:
    """Catches a GGUF that loads and computes something else."""
    done = subprocess.run(
        [sys.executable, "scripts/llamacpp_parity.py", "assets/draft", "--max_new_tokens", "24",
         "--tasks", "[{name: code, limit: 3}]"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["totals"]["llamacpp"]["accepted"] > 0
