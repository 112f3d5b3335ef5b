"""A card says what the files say, no more: every number is found in them, and what they lack is called missing."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from decode.checkpoints.draft_folder import read_metadata
from decode.checkpoints.layouts import read_config
from decode.common.target_record import TargetRecord
from decode.common.typed_json import Estimate, from_json, to_json
from decode.serving.engine import ServedDraft
from eval.results.report import EvalReport, LookupRecord
from tests import drafts
from train.hub import model_card, serving
from train.hub.card_tables import card_images
from train.hub.card_text import CardInputs, other_targets
from train.hub.evidence import Evidence
from train.settings.training import HubLabels

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def facts(
    folder: Path, report: bool = True, referee: bool = False, tuned: bool = False, **changes: Any
) -> CardInputs:
    drafts.draft(folder, **changes)
    sha = drafts.sha_of(folder)
    return CardInputs(
        read_metadata(str(folder)),
        read_config(str(folder)),
        drafts.evidence(
            report=drafts.report(sha) if report else None,
            referee=drafts.referee(sha) if referee else None,
            tuned=drafts.tuned(sha, {"all": 3, "code": 6}) if tuned else None,
        ),
        {"SGLang": ["refused: no such architecture"], "vLLM": []},
    )


def rendered(known: CardInputs, labels: HubLabels = HubLabels()) -> str:  # noqa: B008
    k, source = serving.choose_k(known.own, known.tuned_chains, known.draft, known.config)
    job = ServedDraft(str(known.draft.family), "me/my-draft", "org/target", None, k)
    return str(model_card.render(known, job, source, serving.build_serving_configs(job), labels))


def with_report(known: CardInputs, **changes: Any) -> CardInputs:
    """With another report; `methods` and `engines` may be JSON."""
    content = to_json(known.evidence.report) | to_json(changes)
    report = from_json(EvalReport, content)
    return replace(known, evidence=replace(known.evidence, report=report))


def test_numbers_with_a_lookup_are_not_those_of_the_draft(tmp_path: Path) -> None:
    """Catches a K to serve, or a speed-up on the card, of a method in which the draft was seldom asked."""
    known = facts(tmp_path / "d")
    assert known.evidence.report is not None
    lookup = LookupRecord("ngram", 3)
    faster = [replace(m, name="both", k=9, speedup=Estimate(9.0), lookup=lookup) for m in known.own]
    more = with_report(known, methods=[*known.evidence.report.methods, *faster])
    assert more.own == known.own
    assert rendered(more) == rendered(known)


def values(content: Any) -> Iterator[Any]:
    """Everything that is no container, keys left out."""
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list):
        for item in content:
            yield from values(item)
    else:
        yield content


def unfounded(text: str, *sources: Any) -> list[str]:
    """Cells of the card's tables with a number that none of the sources holds, to the digits that are shown."""
    known = list(values(list(sources)))
    words = sorted(
        (v for v in known if isinstance(v, str) and re.search(r"\d", v)), key=len, reverse=True
    )
    numbers = [v for v in known if isinstance(v, int | float) and not isinstance(v, bool)]
    found = []
    for line in text.splitlines():
        if not line.startswith("| ") or "α_1" in line:  # a header counts positions
            continue
        for cell in line.strip("| ").split(" | ")[1:]:
            rest = cell
            for word in words:
                rest = rest.replace(word, "")
            for match in NUMBER.findall(rest):
                digits = len(match.partition(".")[2])
                value = float(match.replace(",", ""))
                if not any(abs(round(n, digits) - value) < 10.0 ** -(digits + 3) for n in numbers):
                    found.append(cell)
    return found


def test_every_number_comes_from_the_files(tmp_path: Path) -> None:
    """Catches a figure typed by hand, or worked out on the way; a planted one is found."""
    known = facts(tmp_path / "d", referee=True, tuned=True)
    text = rendered(known)
    tables = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(tables) > 30
    sources = (to_json(known.draft), known.config, to_json(known.evidence))
    assert unfounded(text, *sources) == []
    planted = text.replace("2.38 [2.14, 2.60]", "9.87 [2.14, 2.60]", 1)
    assert planted != text
    assert unfounded(planted, *sources) == ["9.87 [2.14, 2.60]"]


def test_numbers_of_other_drafts_stay_out(tmp_path: Path) -> None:
    """Catches a card that shows the best method of a report and not its own."""
    known = facts(tmp_path / "d")
    other = drafts.entry("0" * 64, "stranger", speedup=7.77)
    text = rendered(with_report(known, methods=[*known.own, other]))
    assert "stranger" not in text
    assert "7.77" not in text


def test_what_is_missing_is_called_missing(tmp_path: Path) -> None:
    """Catches a hole filled with a default, or left out so that nobody sees it."""
    lean = facts(tmp_path / "d", report=False, versions={}, hardware={}, git=None)
    text = rendered(lean)
    assert "Losslessness: not measured, no report was given." in text
    assert "Not measured on tasks." in text
    assert "tau 1.676" in text  # of training, and called so
    assert "of the training domains, temperature 1, K = " in text
    assert "greedy, K" not in text
    assert "No speed was measured." in text
    assert "| wall time, s | not recorded |" in text
    assert "| hardware | not recorded |" in text
    assert "| trained by commit | not recorded |" in text
    assert "No licence was stated" in text
    assert "model-index" not in text
    assert "images/" not in text
    assert unfounded(text, to_json(lean.draft), lean.config) == []


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        (("latency_ms",), "first token"),
        (("tokens_per_second_ci", "speedup_ci"), "| 1.44× | 123.5 |"),
    ],
)
def test_reports_may_lack_fields(tmp_path: Path, missing: tuple[str, ...], text: str) -> None:
    """Catches a card that breaks on older reports, or on what was not timed."""
    known = facts(tmp_path / "d")
    own = [to_json(m) | dict.fromkeys(missing) for m in known.own]
    assert text in rendered(with_report(known, methods=own))


def test_the_head_is_what_the_hub_reads(tmp_path: Path) -> None:
    """Catches metadata that the Hub ignores, and results under the name of another metric."""
    labels = HubLabels(base_model="org/target", license="apache-2.0", dataset="me/samples")
    content = rendered(facts(tmp_path / "d"), labels)
    data = ModelCard(content).data
    assert data.base_model == "org/target"
    assert data.base_model_relation == "adapter"
    assert data.license == "apache-2.0"
    assert data.datasets == ["me/samples"]
    assert data.library_name == "draftsmith"
    assert {"speculative-decoding", "draft-model", "eagle3", "vllm", "sglang"} <= set(data.tags)
    results = {r.metric_type: r.metric_value for r in data.eval_results}
    pooled = drafts.entry("", "eagle3")
    assert results == {name: pooled[name] for name in ("tau", "alpha", "speedup")}
    assert yaml.safe_load(content.split("---")[1])["model-index"][0]["name"] == "my-draft"


def test_what_was_served_is_told_from_what_was_checked(tmp_path: Path) -> None:
    """Catches a card that claims an engine which nobody ran."""
    lines = rendered(facts(tmp_path / "a", referee=True)).splitlines()
    of = {line.split("**")[1]: line for line in lines if line.startswith("- **")}
    assert "Run in vLLM 0.32.0: 11 of 12 prompts" in of["vLLM"]
    assert "Checked by rules only, not run: nothing found wrong" in of["Triton"]
    assert "not run: refused: no such architecture" in of["SGLang"]
    assert "Not run, and not checked" in of["TensorRT-LLM"]
    assert "cannot serve it" in of["TGI"]
    assert "Run in vLLM" not in rendered(facts(tmp_path / "b"))


def test_assistance_in_transformers_is_told(tmp_path: Path) -> None:
    """Catches a card that offers assistant_model and hides what it did, or tells of another draft's."""
    known = facts(tmp_path / "d", family="causal")
    engines = [
        drafts.assisted("eagle3", gain=0.93, gain_ci=[0.88, 0.98]),
        drafts.assisted("stranger", gain=1.77),
    ]
    known = with_report(known, engines=engines)
    line = next(x for x in rendered(known).splitlines() if x.startswith("- **transformers**"))
    assert "Run: transformers with assistant_model = eagle3 (K = 4" in line
    assert "0.93× [0.88, 0.98] the speed of its own generate, n = 33. It is slower" in line
    assert "stranger" not in line


def test_slow_is_called_slow(tmp_path: Path) -> None:
    """Catches a card that shows the fast task and hides the slow one."""
    known = facts(tmp_path / "d")
    slow = replace(known.own[-1], speedup=Estimate(0.71, (0.62, 0.82)))
    text = rendered(with_report(known, methods=[*known.own[:-1], slow]))
    assert (
        "Slower than plain decoding as eagle3, K = 4, temperature 0, batch 1: prose 0.71×." in text
    )


def test_names_cannot_change_the_page(tmp_path: Path) -> None:
    """Catches a task's name that ends a table cell or becomes HTML."""
    known = facts(tmp_path / "d")
    odd = replace(known.own[1], task="a | b <script>\n# c")
    text = rendered(with_report(known, methods=[known.own[0], odd]))
    assert "<script>" not in text
    assert "| a \\| b &lt;script> # c |" in text


def test_several_sampled_sets_are_all_told(tmp_path: Path) -> None:
    """Catches a mixture whose second set is lost, with its weight."""
    parts = [
        {
            "path": "one",
            "weight": 3,
            "manifest": {"counts": {"answered": 2100}, "chat_template_hash": None},
        },
        {
            "path": "two",
            "weight": 1,
            "manifest": {"counts": {"answered": 71}, "chat_template_hash": "ab12"},
        },
    ]
    text = rendered(facts(tmp_path / "d", data_manifest=parts))
    assert "number of answers: 2,100 + 71" in text
    assert "| two (weight 1) counts.answered | 71 |" in text
    assert "without a chat template" not in text


def indexed(text: str) -> dict[str, dict[str, float]]:
    """{name of the setting: {metric's name: value}} as the Hub reads a card's front matter."""
    (model,) = yaml.safe_load(text.split("---")[1])["model-index"]
    names = [result["dataset"]["name"] for result in model["results"]]
    assert len(set(names)) == len(names)
    return {
        result["dataset"]["name"]: {m["name"]: m["value"] for m in result["metrics"]}
        for result in model["results"]
    }


def measured(tmp_path: Path, *changes: dict[str, Any], plain: bool = True) -> CardInputs:
    """What a card is made from, with an entry for each of `changes`, whose figures all differ."""
    known = facts(tmp_path / "d")
    sha = known.draft.draft_sha256
    own = []
    for number, change in enumerate(changes):
        figures = {
            "tau": 2.0 + number / 8, "alpha": 0.5 + number / 64, "speedup": 1.25 + number / 16,
            "speedup_ci": [1.0 + number / 16, 1.5 + number / 16],
        }  # fmt: skip
        fields = {"name": "eagle3", "task": "all", **figures, **change}
        own.append(drafts.entry(sha, **fields))
    others = [drafts.entry(None, "plain", speedup=1.0, alpha=None)] if plain else []
    return with_report(known, methods=[*others, *own])


def figures(number: int, name: str = "eagle3", k: int = 4) -> dict[str, float]:
    """Those that `measured` gives the entry of this number."""
    values = (2.0 + number / 8, 0.5 + number / 64, 1.25 + number / 16)
    labels = ("τ", "α", "speed-up")
    return {f"{label}, {name}, K {k}": v for label, v in zip(labels, values, strict=True)}


INDEX_CASES: dict[str, tuple[list[dict[str, Any]], dict[str, dict[str, float]]]] = {
    "only T = 0": ([{}], {"all, temperature 0, batch 1": figures(0)}),
    "only T = 1": ([{"temperature": 1.0}], {"all, temperature 1, batch 1, top-p 1": figures(0)}),
    "three temperatures": (
        [{"temperature": 1.0}, {}, {"temperature": 0.7}],
        {
            "all, temperature 1, batch 1, top-p 1": figures(0),
            "all, temperature 0, batch 1": figures(1),
            "all, temperature 0.7, batch 1, top-p 1": figures(2),
        },
    ),
    "batches": (
        [{}, {"batch_size": 8}, {"temperature": 1.0, "batch_size": 8}],
        {
            "all, temperature 0, batch 1": figures(0),
            "all, temperature 0, batch 8": figures(1),
            "all, temperature 1, batch 8, top-p 1": figures(2),
        },
    ),
    "tasks, pooled": (
        [{"task": "code"}, {"task": "all"}, {"task": "prose"}],
        {"all, temperature 0, batch 1": figures(1)},
    ),
    "tasks, not pooled": (
        [{"task": "code"}, {"task": "prose", "temperature": 1.0}],
        {
            "code, temperature 0, batch 1": figures(0),
            "prose, temperature 1, batch 1, top-p 1": figures(1),
        },
    ),
    "a method at one temperature only": (
        [
            {},
            {"temperature": 1.0},
            {"name": "eagle3-tree", "tree": {"width": 2, "nodes": 1}, "temperature": 1.0},
        ],
        {
            "all, temperature 0, batch 1": figures(0),
            "all, temperature 1, batch 1, top-p 1": figures(1) | figures(2, "eagle3-tree"),
        },
    ),
    "two K": (
        [{"k": 2}, {"k": 6}, {"k": 6, "temperature": 1.0}],
        {
            "all, temperature 0, batch 1": figures(0, k=2) | figures(1, k=6),
            "all, temperature 1, batch 1, top-p 1": figures(2, k=6),
        },
    ),
    "cut tails": (
        [{"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0}, {"top_k": 0, "top_p": 1.0}],
        {
            "all, temperature 1, batch 1, top-p 0.9": figures(0),
            "all, temperature 1, batch 1, top-p 1": figures(1),
            "all, temperature 0, batch 1": figures(2),
        },
    ),
}


@pytest.mark.parametrize("case", INDEX_CASES)
def test_each_setting_has_its_own_figures_under_its_own_name(case: str, tmp_path: Path) -> None:
    """Catches figures of one temperature, batch size, task or K under the name of another, and lost ones."""
    entries, wanted = INDEX_CASES[case]
    known = measured(tmp_path, *entries)
    text = rendered(known)
    assert indexed(text) == wanted
    for result in ModelCard(text).data.eval_results:  # and as huggingface_hub reads them back
        assert wanted[result.dataset_name][result.metric_name] == result.metric_value
    # The sentences above say the same.
    for number, m in enumerate(known.own):
        if not m.is_pooled:
            continue
        low, high = 1.0 + number / 16, 1.5 + number / 16
        line = f"{m.speedup.value:.2f}× [{low:.2f}, {high:.2f}] the speed of plain decoding ({m.name}, K = {m.k}, "
        assert f"{line}temperature {m.temperature:g}, batch {m.batch_size}" in text


def test_what_was_not_timed_has_no_speed(tmp_path: Path) -> None:
    """Catches a speed-up of none, or sentences about speed where none was measured."""
    untimed = {"speedup": None, "speedup_ci": None, "mode": "compiled", "dtype": "bfloat16"}
    known = measured(tmp_path, untimed, {"temperature": 1.0} | untimed)
    text = rendered(known)
    assert {name for found in indexed(text).values() for name in found} == {
        "τ, eagle3, K 4",
        "α, eagle3, K 4",
    }
    assert "Speed-up: not measured." in text
    assert "Speed-ups are of draftsmith's engine" not in text


def test_sentences_follow_the_entries(tmp_path: Path) -> None:
    """Catches tasks of other methods, speed-ups called not measured though tasks have them, a lossy rule that is not
    named, and two K of one method that share a row of the figure."""
    known = measured(
        tmp_path,
        {"task": "code", "mode": "compiled", "dtype": "bfloat16"},
        {"task": "code", "k": 7, "temperature": 1.0, "lossy": True},
    )
    text = rendered(known)
    assert "Acceptance was measured on code; on other text it differs." in text
    assert "Speed-up: not measured." not in text
    assert (
        "(eagle3, K = 4, code, temperature 0, batch 1, n = 37, AMD EPYC, compiled, bfloat16)"
        in text
    )
    assert "temperature 1, batch 1, top-p 1, n = 37, AMD EPYC, eager, float32, lossy)" in text
    assert indexed(text)["code, temperature 1, batch 1, top-p 1"].keys() == {
        "τ, eagle3, K 7, lossy", "α, eagle3, K 7, lossy", "speed-up, eagle3, K 7, lossy",
    }  # fmt: skip
    both = measured(tmp_path / "two", {"k": 2}, {"k": 6})
    (figure,) = (i for i in card_images(both.own, 2) if i.name.startswith("speedup"))
    assert all(f"eagle3, K {k}" in figure.svg for k in (2, 6))
    (lines,) = (i for i in card_images(both.own, 2) if i.name.startswith("acceptance"))
    assert lines.caption == "Acceptance by position, eagle3, K = 2"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, None])
def test_the_data_is_called_what_it_is(sampling: Any, tmp_path: Path) -> None:
    """Catches texts of others that are called answers of the target."""
    made = {"counts": {"answered": 71}} | ({} if sampling is None else {"sampling": sampling})
    text = rendered(facts(tmp_path / "d", data_manifest=made))
    kind = "texts that it did not write" if sampling == {} else "answers of that target"
    assert f"Distilled on {kind} (number of answers: 71)" in text


@pytest.mark.parametrize("family", ["eagle3", "dflash", "dspark", "medusa", "causal"])
def test_what_llamacpp_can_do_is_not_denied(family: str, tmp_path: Path) -> None:
    """Catches a card that says llama.cpp cannot serve drafts that are written for it, or that it serves all of them."""
    lines = rendered(facts(tmp_path / "d", family=family)).splitlines()
    line = next(x for x in lines if x.startswith("- **llama.cpp**"))
    assert ("cannot serve it" in line) == (family == "medusa")
    assert ("`serving/llamacpp.sh`" in line) == (family != "medusa")
    heads = family in ("eagle3", "dflash", "dspark")
    assert ("whose hidden states it hands out" in line) == heads


def test_figures_of_another_target_are_said_to_be(tmp_path: Path) -> None:
    """Catches a card whose speed-ups were measured on other weights than the draft was trained for."""
    known = facts(tmp_path / "d", tuned=True)
    report, tuned = known.evidence.report, known.evidence.tuned
    assert report is not None
    assert tuned is not None
    own, other = TargetRecord("t", weights="a" * 16), TargetRecord("t", weights="b" * 16)
    draft = replace(known.draft, target=own)
    for measured_on, tuned_on, files in (
        (own, own, []),
        (TargetRecord("t"), own, []),
        (other, own, ["report.json"]),
        (other, other, ["report.json", "tuned.json"]),
    ):
        evidence = Evidence(
            replace(report, target=measured_on), tuned=replace(tuned, target=tuned_on)
        )
        given = replace(known, draft=draft, evidence=evidence)
        lines = other_targets(given)
        assert [line.split()[0] for line in lines] == files
        text = rendered(given)
        for line in lines:
            assert f"weights {'b' * 16}" in line
            assert line in text
        trained_too = replace(given, draft=replace(draft, original_target=other))
        assert other_targets(trained_too) == []
