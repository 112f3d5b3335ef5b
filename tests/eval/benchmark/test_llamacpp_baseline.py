"""llama.cpp as another engine: what its server is asked, what is made of its answers; and the real one's answers."""

import json
import os
import stat
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from decode.model.loading import Target, load_target
from decode.verification.sampling import SamplingParams
from eval.benchmark.llamacpp_baseline import LlamaCppEngine, drafts_of, target_file
from eval.benchmark.methods import build_methods
from eval.settings.evaluation import EvalConfig, MethodConfig
from eval.tasks.loading import TaskPrompt
from tests import worlds
from tests.worlds import ROOT

STAND_IN = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

here = Path(__file__).parent
files = {flag: Path(sys.argv[sys.argv.index(flag) + 1]) for flag in ("-m", "-md") if flag in sys.argv}
assert all(file.read_bytes()[:4] == b"GGUF" for file in files.values())
with open(here / "starts", "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")

class Handler(BaseHTTPRequestHandler):
    def reply(self, code, text):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self.reply(200, "ok")

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (here / "request").write_text(json.dumps(request))
        if request["prompt"] == [13]:
            return self.reply(400, "thirteen")
        tokens = request["prompt"] * request["n_predict"]
        timings = {"draft_n": 9, "draft_n_accepted": 5} if len(sys.argv) > 20 else {}
        self.reply(200, json.dumps({"tokens": tokens[: request["n_predict"]], "timings": timings}))

    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
SERVER = os.environ.get("LLAMA_SERVER", "")


def stand_in(folder: Path) -> str:
    script = folder / "llama-server"
    script.write_text(f"#!{sys.executable}\n{STAND_IN}")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def asked(folder: Path, methods: Sequence[MethodConfig] = (), **changes: Any) -> EvalConfig:
    return EvalConfig(
        target=str(ROOT / "assets/target"), llama_server=stand_in(folder), methods=[*methods],
        compare="llamacpp", seed=7, **changes,
    )  # fmt: skip


def starts(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "starts").read_text().splitlines()]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(str(ROOT / "assets/target"), "cpu")


def test_the_server_is_asked_for_what_ours_decodes(target: Target, tmp_path: Path) -> None:
    """Catches other prompts, another temperature or limit, prefill as a round, and a server that stays."""
    methods = [
        MethodConfig("ngram"),
        MethodConfig("causal", draft=str(ROOT / "assets/draft"), k=5),
        MethodConfig("other", draft=str(ROOT / "assets/draft"), lookup="ngram"),
    ]
    s = asked(tmp_path, methods, max_new_tokens=9, k=3)
    ours = drafts_of(build_methods(s, target), s)
    assert [m.name for m in ours] == ["ngram", "causal"]
    letter = target.tokenizer("x")["input_ids"][0]
    item = TaskPrompt("t", "a", [letter, 17], stop=())
    sampling = SamplingParams(0.5, 9, 0.8)
    with ExitStack() as block:
        file = target_file(s, block)
        engines = [
            LlamaCppEngine(s, target, m, sampling, file, context=11, block=block)
            for m in (None, *ours)
        ]
        assert not (tmp_path / "starts").exists()  # before its first prompt
        plain, ngram, causal = (engine.answer(item) for engine in engines)
        request = json.loads((tmp_path / "request").read_text())
        stopped = engines[0].answer(TaskPrompt("t", "b", [letter, 17], stop=("x",)))
        failed = engines[0].answer(TaskPrompt("t", "c", [13]))
        files = [Path(words[words.index("-m") + 1]) for words in starts(tmp_path)]
        assert all(file.is_file() for file in files)
    assert plain["ids"] == [letter, 17, letter, 17, letter, 17, letter, 17, letter]
    assert (plain["rounds"], plain["accepted"]) == (8, 0)
    assert (ngram["rounds"], ngram["accepted"]) == (causal["rounds"], causal["accepted"]) == (3, 5)
    assert plain["seconds"] > 0
    wanted = {
        "prompt": [letter, 17],
        "n_predict": 9,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.8,
        "seed": 7,
    }
    assert wanted.items() <= request.items()
    assert request["cache_prompt"] is False
    assert stopped["ids"] == [letter]
    assert failed["error"].startswith("llama-server refuses a request: thirteen")
    words = [" ".join(line) for line in starts(tmp_path)]
    assert len(words) == 3
    assert [w.partition(" -np 1 -c ")[2].split()[0] for w in words] == ["12", "15", "17"]
    assert "--spec-type" not in words[0]
    assert "--spec-type ngram-mod --spec-ngram-mod-n-match 3" in words[1]
    assert "--spec-ngram-mod-n-max 3" in words[1]
    assert "--spec-type draft-simple --spec-draft-n-max 5" in words[2]
    assert not any(file.exists() for file in files)


def test_the_context_ends_the_answer_of_both(target: Target, tmp_path: Path) -> None:
    s = asked(tmp_path, max_new_tokens=900)
    prompt = [17] * (target.runner.context - 4)
    with ExitStack() as block:
        engine = LlamaCppEngine(
            s, target, None, SamplingParams(), target_file(s, block), context=10_000, block=block
        )
        assert engine.answer(TaskPrompt("t", "a", prompt))["ids"] == [17] * 4
    assert f"-c {target.runner.context}" in " ".join(starts(tmp_path)[0])


def test_a_draft_s_own_file_is_served(target: Target, tmp_path: Path) -> None:
    """Catches a draft that llama.cpp gets in float32 although the method names its file in few bits."""
    file = tmp_path / "d.gguf"
    file.write_bytes(b"GGUF")
    causal = MethodConfig("causal", draft=str(ROOT / "assets/draft"), k=5, gguf=str(file))
    s = asked(tmp_path, [causal])
    (method,) = build_methods(s, target)
    with ExitStack() as block:
        served = target_file(s, block), 20, block
        engine = LlamaCppEngine(s, target, method, SamplingParams(), *served)
        engine.answer(TaskPrompt("t", "a", [17]))
    assert str(file) in starts(tmp_path)[0]


def test_a_file_that_is_given_is_served(target: Target, tmp_path: Path) -> None:
    """Catches weights that are written anew beside the quantized file whose speed was asked for."""
    (tmp_path / "t.gguf").write_bytes(b"GGUF")
    s = asked(tmp_path, llama_gguf=str(tmp_path / "t.gguf"), dtype="w8a8")
    with ExitStack() as block:
        engine = LlamaCppEngine(
            s, target, None, SamplingParams(), target_file(s, block), context=20, block=block
        )
        engine.answer(TaskPrompt("t", "a", [17]))
    assert str(tmp_path / "t.gguf") in starts(tmp_path)[0]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--llama_server", "/nowhere/llama-server"], "LLAMA_SERVER"),
        (["--llama_server", sys.executable, "--dtype", "w8a8"], "--llama_gguf"),
        (["--llama_server", sys.executable, "--llama_gguf", "/nowhere.gguf"], "/nowhere.gguf"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_measured(
    words: list[str], named: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = worlds.call("eval/run.py", "--compare", "llamacpp", "--out", out, *words)
    assert named in done.error()
    assert not (out / "report.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(not SERVER, reason="LLAMA_SERVER names no llama-server")
def test_the_real_one_gives_our_texts_and_accepts_what_we_accept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    worlds.call(
        "eval/run.py", "--compare", "llamacpp", "--out", out, "--temperatures", "[0.0]", "--phase_prompts", 0,
        "--tasks", "[{name: code, limit: 3}]", "--max_new_tokens", 24,
        "--methods", "[{name: ngram}, {name: causal, draft: assets/draft}]",
    ).ok()  # fmt: skip
    report = json.loads((out / "report.json").read_text())
    own = {m["name"]: m for m in report["methods"] if m["task"] == "all"}
    served = {e["name"]: e for e in report["engines"] if e["task"] == "all"}
    assert served.keys() == {"plain", "ngram", "causal"}
    assert {(e["same_as_ours"], len(e["failed"])) for e in served.values()} == {(3, 0)}
    assert served["causal"]["tau"] == own["causal"]["tau"]
    assert {(e["in_turn"], e["served"]) for e in served.values()} == {(True, "float32")}
