"""Serving files are what engines take: golden files for each family, and the draft length that was measured."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from decode.checkpoints.draft_folder import DraftMetadata
from decode.common.errors import UserError
from decode.common.typed_json import from_json
from decode.serving import vllm_engine
from decode.serving.engine import ServedDraft
from decode.serving.vllm_engine import VLLM
from eval.results.report import MethodResult
from eval.results.tuned import TunedReport
from tests.drafts import entry, tuned
from train.hub.serving import build_serving_configs, choose_k, served_arguments

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "serving"
JOBS = {
    "causal": ServedDraft("causal", "me/draft", "org/target", None, 3),
    "medusa": ServedDraft("medusa", "me/draft", "org/target", None, 4),
    "eagle1": ServedDraft("eagle1", "me/draft", "org/target", None, 4),
    "eagle3": ServedDraft("eagle3", "me/draft", "org/target", None, 5),
    "eagle3-taps": ServedDraft("eagle3", "me/draft", "org/target", "4e0f3a1", 5, (3, 9, 14)),
    "dflash": ServedDraft("dflash", "me/draft", "org/target", None, 7),
    "dspark": ServedDraft("dspark", "me/draft", "org/target", "4e0f3a1", 8),
}


def files_for(job: ServedDraft) -> dict[str, str]:
    return {name: text for x in build_serving_configs(job) for name, text in x.files.items()}


@pytest.mark.parametrize("name", JOBS)
def test_files_are_the_golden_ones(name: str) -> None:
    """Catches a flag that was renamed, an engine that lost its file, a draft length that did not arrive."""
    folder = GOLDEN / name
    golden = {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert files_for(JOBS[name]) == golden


@pytest.mark.parametrize("name", JOBS)
def test_every_file_says_the_same(name: str) -> None:
    """Catches SGLang's count without its root, TensorRT-LLM's other way to count layers, a torn JSON in a shell."""
    job = JOBS[name]
    files = files_for(job)
    given = files["vllm.sh"].split("--speculative-config '")[1].split("'")[0]
    model = json.loads(files[f"triton/draftsmith_{job.family}/1/model.json"])
    assert (
        json.loads(given)
        == model["speculative_config"]
        == vllm_engine.speculative_config(job.family, job.repo, job.k)
    )
    method = VLLM.method(job.family)
    assert json.loads(given)["method"] == method != ""  # never left to be guessed from the path
    if "sglang.sh" in files:
        assert f"--speculative-num-steps {job.k} " in files["sglang.sh"]
        assert f"--speculative-num-draft-tokens {job.k + 1}\n" in files["sglang.sh"]
    if "trtllm.yml" in files:
        config = yaml.safe_load(files["trtllm.yml"])["speculative_config"]
        assert config["max_draft_len"] == job.k
        assert config.get("eagle3_layers_to_capture", []) == [layer - 1 for layer in job.layers]
    if "llamacpp.sh" in files:
        lines = [line.strip(" \\") for line in files["llamacpp.sh"].splitlines()]
        assert f"--spec-draft-n-max {job.k}" in lines
        kind = "draft-simple" if job.family == "causal" else f"draft-{job.family}"
        assert f"--spec-type {kind}" in lines
    if "transformers_assistant.py" in files:
        compile(files["transformers_assistant.py"], "snippet", "exec")


def test_names_cannot_break_out_of_a_command() -> None:
    """Catches a target's name that a shell or Python would run."""
    evil = "org/x'; rm -rf ~; '"
    files = files_for(ServedDraft("causal", "me/d", evil, None, 4))
    assert evil in shlex.split(files["vllm.sh"].replace("\\\n", " "))
    assert shlex.split(files["llamacpp.sh"].replace("\\\n", " "), comments=True).count(evil) == 2
    compile(files["transformers_assistant.py"], "snippet", "exec")


def test_engines_that_cannot_name_the_embedding_get_no_file() -> None:
    """Catches a crash, or a layer -1, for drafts of targets so small that the embedding is tapped."""
    job = ServedDraft("eagle3", "me/d", "org/t", None, 4, (0, 1))
    found = {config.engine: config for config in build_serving_configs(job)}
    assert found["vLLM"].files
    for engine in ("SGLang", "TensorRT-LLM"):
        assert not found[engine].files
        assert "embedding" in found[engine].note


OFF = {"enable_thinking": False}


@pytest.mark.parametrize(
    ("templates", "given"),
    [
        (None, {}),
        ([{}], {}),
        ([{}, OFF], {}),
        ([OFF, {}], OFF),
        ([{"date": "it's 26 Jul"}], {"date": "it's 26 Jul"}),
        ([{"name": "rag", **OFF}], {}),
        ([{"persona": "not published"}], {}),
    ],
)
def test_servers_render_as_the_training_prompts_were(templates: Any, given: dict[str, Any]) -> None:
    """Catches a head of answers without thoughts behind a server that lets the target think."""
    served = served_arguments(DraftMetadata(templates=templates))
    assert served == given
    job = ServedDraft("causal", "me/d", "org/t", None, 4, template=served)
    files = files_for(job)
    for name, flag in (
        ("vllm.sh", "--default-chat-template-kwargs"),
        ("llamacpp.sh", "--chat-template-kwargs"),
    ):
        words = shlex.split(files[name].replace("\\\n", " "), comments=True)
        assert (flag in words) == bool(given)
        if given:
            assert json.loads(words[words.index(flag) + 1]) == given


def recipe(k: int | None) -> DraftMetadata:
    return DraftMetadata(training={"check": {} if k is None else {"k": k}})


def method(task: str = "all", **changes: Any) -> MethodResult:
    return from_json(MethodResult, entry("x", "a", task, **changes))


def test_k_is_the_fastest_measured() -> None:
    """Catches a K taken from a tree, a lossy rule, one task, another temperature, or the recipe."""
    own = [
        method(k=2, speedup=1.2), method(k=4, speedup=1.5), method(k=8, speedup=1.1),
        method(k=7, speedup=9.0, tree={"width": 4, "nodes": 12}),
        method(k=6, speedup=9.0, lossy=True), method("code", k=5, speedup=9.0),
        method(k=3, speedup=9.0, temperature=1.0),
    ]  # fmt: skip
    k, why = choose_k(own, [], recipe(9), {})
    assert k == 4
    assert "the fastest of [2, 4, 8] measured" in why
    assert "the only one measured" in choose_k(own[:1], [], recipe(9), {})[1]
    k, why = choose_k([method(speedup=None)], [], recipe(9), {})
    assert k == 9
    assert "no speed-up of a chain was measured" in why
    assert choose_k([], [], recipe(9), {"num_heads": 3})[0] == 3
    with pytest.raises(UserError, match="give --report"):
        choose_k([], [], recipe(None), {})


def test_a_tuned_k_is_served() -> None:
    """Catches a K of the report, which measures one, where ten were tuned."""
    chains = from_json(TunedReport, tuned("a", {"all": 3, "code": 6})).fastest_chains("a")
    k, why = choose_k([method(k=4, speedup=1.5)], chains, recipe(9), {})
    assert k == 3
    assert "the fastest of [2, 3, 4, 5, 6] that eval/tune.py tried (1.73× [1.62, 1.84]" in why
    assert "temperature 0, batch 1, n = 31" in why
