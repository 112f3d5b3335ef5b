"""Small dumps of each engine and outputs of ours, with figures worked out by hand, and damage that must be seen."""

import json
from dataclasses import replace
from fractions import Fraction as F
from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import UserError
from decode.serving.log_counts import EngineLog, RequestCounts, by_position
from eval import rescore
from eval.served.scoring import compare, match_prompts, read_log, score
from tests.worlds import ROOT

LOGS = ROOT / "tests" / "golden" / "engine_logs"


def scored(name: str, **options: Any) -> dict[str, Any]:
    return score(read_log(str(LOGS / name), **options)).to_json()


def figures(found: dict[str, Any], kind: str = "pooled") -> dict[str, Any]:
    return {k: found[k][kind] for k in ("tau", "alpha", "acceptance_rate") if k in found}


def positions(found: dict[str, Any], kind: str) -> list[Any]:
    return [x[kind] for x in found["by_position"]]


def near(values: dict[str, F] | list[F]) -> Any:
    if isinstance(values, dict):
        return pytest.approx({key: float(value) for key, value in values.items()}, abs=1e-12)
    return pytest.approx([float(value) for value in values], abs=1e-12)


# ---- figures by hand ----


def test_vllm_dumps_and_their_difference() -> None:
    """1,200 − 1,000 drafts of 3, 1,770 − 1,500 accepted: 140, 80 and 50 by position, summed over two engines."""
    whole = scored("vllm_after.txt")
    assert figures(whole)["tau"] == pytest.approx(1 + 1770 / 1200)
    found = scored("vllm_after.txt", before=str(LOGS / "vllm_before.txt"))
    assert found["counts"] == {"rounds": 200, "drafted": 600, "accepted": 270}
    assert figures(found) == near(
        {"tau": F(470, 200), "alpha": F(270, 420), "acceptance_rate": F(270, 600)}
    )
    assert positions(found, "alpha") == near([F(140, 200), F(80, 140), F(50, 80)])
    assert found["requests"] is found["tau"]["ci"] is found["tau"]["mean_of_requests"] is None


def test_sglang_dump() -> None:
    """5,000 tokens of 40 requests in 1,800 steps: 4,960 after prefill. The gauge of the last interval stands apart."""
    found = scored("sglang_metrics.txt")
    assert figures(found) == near({"tau": F(4960, 1800)})
    assert found["counts"]["accepted"] == 3160
    assert found["gauges"]["sglang:spec_accept_length"] == 2.9


def test_a_real_llama_server() -> None:
    """Two answers of 20 tokens with K = 4, of which 5 and 12 drafted tokens were accepted. 20 passes drafted: 11 · 4 +
    2 + 1 and 6 · 4 + 1 tokens. The server's log said mean lengths of 1.38 = 1 + 5 ÷ 13 and 2.71 = 1 + 12 ÷ 7."""
    found = scored("llamacpp_metrics.txt")
    assert found["engine"] == "llamacpp"
    assert found["counts"] == {"rounds": 13 + 7, "drafted": 44 + 3 + 24 + 1, "accepted": 17}
    assert positions(found, "unconditional") == near([F(12, 20), F(5, 20), F(0), F(0)])
    assert positions(found, "alpha") == [None] * 4  # rounds drafted 1 to 4 tokens


def outputs(rounds: list[list[int]], **other: Any) -> str:
    line = {"task": "a", "id": "1", "output_ids": [7], "rounds": rounds, "method": "causal"} | other
    return json.dumps(line) + "\n"


def test_our_own_outputs(tmp_path: Path) -> None:
    """Two rounds of 4 tokens accepted 2 and 4, two of 2 accepted 0 and 2, one drafted nothing. Positions 1 to 4 were
    reached by 4, 3, 2 and 1 rounds: the last one, of 2 tokens, reached no third."""
    rounds = [[4, 2], [4, 4], [2, 0], [0, 0], [2, 2]]
    (tmp_path / "log").write_text(outputs(rounds) + outputs([[4, 4]], id="2"))
    found = read_log(str(tmp_path / "log"))
    assert (found.engine, [r.prompt for r in found.requests]) == ("draftsmith", ["a/1", "a/2"])
    assert found.requests[0].accepted_at == (3, 3, 1, 1)
    assert found.requests[0].reached_at == (4, 3, 2, 1)
    assert figures(score(found).to_json()) == near(
        {"tau": F(6 + 12, 6), "alpha": F(12, 14), "acceptance_rate": F(12, 16)}
    )


def test_answers_of_one_method_and_temperature_are_chosen(tmp_path: Path) -> None:
    """Catches answers of other methods, of plain decoding or of other temperatures among those that are scored."""
    lines = [
        outputs([[0, 0]], method="plain", temperature=0.0),
        outputs([[4, 2]], temperature=0.0),
        outputs([[4, 3]], temperature=1.0),
        outputs([[4, 1]], method="eagle3", temperature=0.0),
    ]
    (tmp_path / "log").write_text("".join(lines))
    path = str(tmp_path / "log")
    chosen = {"eagle3": read_log(path, method="eagle3"), "hot": read_log(path, "", "causal", 1.0)}
    assert {name: [r.accepted for r in log.requests] for name, log in chosen.items()} == {
        "eagle3": [1],
        "hot": [3],
    }
    with pytest.raises(UserError, match="causal 0.0 and causal 1.0: choose by --method and"):
        read_log(path, method="causal")
    (tmp_path / "log").write_text(lines[0] + lines[1])
    assert [r.accepted for r in read_log(path).requests] == [2]


def test_rounds_of_several_lengths() -> None:
    """Catches short drafts that count against positions they never had."""
    assert by_position({3: [1, 0, 2, 5], 2: [1, 0, 1]}) == ((8, 8, 5), (10, 8, 7))
    assert by_position({0: [4]}) == ((), ())


# ---- damage ----


DUMP = (LOGS / "vllm_after.txt").read_text().replace("num_drafts_", "num_X_")
DUMP = DUMP.replace("num_draft_tokens_", "num_drafts_")  # with num_X_ for num_draft_tokens_


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (outputs([[0, 0]]), "no answer drafted a token"),
        ("", "neither outputs.jsonl nor"),
        ('{"text": "abc', "log:1"),
        ("a table\nof numbers\n", "a /metrics dump of vLLM, SGLang or llama.cpp"),
        (DUMP.replace("num_X_", "num_draft_tokens_"), "1200 drafted tokens in 3600 rounds"),
        ("vllm:a 1\nsome text\n", "log:2 is no line of a /metrics dump"),
        ("vllm:num_requests_running 3\n", "has no vllm:spec_decode_num_drafts"),
        ("sglang:spec_verify_calls_total 9\n", "has no sglang:generation_tokens"),
        (outputs([[4, 5]]), "its rounds are [drafted, accepted]"),
        (outputs([[4, 2]]) + outputs([[4, 2]], method="eagle3"), "lines of causal and eagle3"),
        ("[]\n", "neither outputs.jsonl nor"),
        ('{"choices": []}\n', "no line of outputs.jsonl"),
    ],
)
def test_bad_logs_end_with_one_line(content: str, says: str, tmp_path: Path) -> None:
    """Catches swapped or damaged fields that give a figure, and errors without advice. A dump has no histogram that
    could contradict swapped counters."""
    (tmp_path / "log").write_text(content)
    with pytest.raises(UserError) as error:
        read_log(str(tmp_path / "log"))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_dumps_are_of_one_run_and_in_their_order(tmp_path: Path) -> None:
    """Catches the difference of dumps in the wrong order or of a server that was started again."""
    with pytest.raises(
        UserError, match="num_drafts is lower in .*vllm_before.txt than in the dump"
    ):
        read_log(str(LOGS / "vllm_before.txt"), before=str(LOGS / "vllm_after.txt"))
    (tmp_path / "log").write_text(outputs([[4, 2]]))
    with pytest.raises(UserError, match="--before is for /metrics dumps"):
        read_log(str(tmp_path / "log"), before=str(LOGS / "vllm_before.txt"))


# ---- two logs ----


def log(counts: list[tuple[int, int]], name: str = "a", prompts: str = "p") -> EngineLog:
    """A log of requests of (rounds, accepted) with 4 drafts a round."""
    requests = [
        RequestCounts(rounds, 4 * rounds, accepted, prompt=f"{prompts}{i}")
        for i, (rounds, accepted) in enumerate(counts)
    ]
    return EngineLog(name, "draftsmith", requests)


def test_the_mean_of_requests_can_say_the_opposite() -> None:
    """Simpson: a is ahead in the mean of requests, 2.05 to 1.95, and far behind in what was generated, 1.29 to 2.71."""
    a, b = (score(x).to_json() for x in (log([(10, 20), (90, 9)]), log([(90, 171), (10, 0)])))
    assert (a["tau"]["mean_of_requests"], b["tau"]["mean_of_requests"]) == near([F(41, 20), F(39, 20)])  # fmt: skip
    assert (a["tau"]["pooled"], b["tau"]["pooled"]) == near([F(129, 100), F(271, 100)])


def test_two_logs_that_are_not_apart() -> None:
    """τ 2.5 and 2.35 on eight prompts that differ more than that; twice the prompts are needed for 1/√2 of a
    difference."""
    a = log([(10, 30), (10, 0), (10, 25), (10, 5), (10, 20), (10, 10), (10, 14), (10, 16)])
    b = log([(10, 18), (10, 9), (10, 28), (10, 0), (10, 25), (10, 4), (10, 16), (10, 8)])
    found = compare(a, b)
    tau = found.differences["tau"]
    assert tau.value == pytest.approx(float(F(120 - 108, 80)))
    low, high = tau.ci
    assert low < 0 < tau.value < high
    assert found.p_value > 0.05
    detects = found.detectable_difference
    assert detects > tau.value
    needed = found.prompts_needed
    assert 8 * (detects / tau.value) ** 2 <= needed < 8 * (detects / 0.15) ** 2 + 1
    assert found.verdict.startswith("these two numbers are not apart: the difference 0.150 is within [")  # fmt: skip
    assert f"{needed:,} prompts would show it; these 8 would show one of" in found.verdict
    rate = found.differences["acceptance_rate"].value
    assert rate == pytest.approx(12 / 320)


def test_two_logs_that_are_apart() -> None:
    """Each of 12 prompts accepts more in a: p = 2 ÷ 2^12 at least, and the interval is above 0."""
    a = log([(10, 20 + i) for i in range(12)])
    b = log([(10, 10 + i) for i in range(12)])
    found = compare(a, b)
    assert found.differences["tau"].value == pytest.approx(1.0)
    assert found.p_value == pytest.approx(2 / 2**12)
    assert found.verdict.startswith("these two numbers are apart: the difference 1.000")
    backwards = compare(b, a)
    assert backwards.differences["tau"].value == pytest.approx(-1.0)
    assert "are apart" in backwards.verdict


def test_few_prompts_show_nothing() -> None:
    """Catches a verdict, or a power, from five prompts: no way of swapping their labels gives p < 0.05."""
    found = compare(log([(10, 40)] * 5), log([(10, 0)] * 5))
    assert found.p_value == pytest.approx(2 / 2**5)
    assert "5 prompts are too few" in found.verdict
    assert found.prompts_needed is None
    same = compare(log([(10, 4)] * 9), log([(10, 4)] * 9))
    assert "the same: the difference is 0" in same.verdict


def test_prompts_are_matched_by_name() -> None:
    """Catches pairs of different prompts, which make a paired test meaningless."""
    a, b = log([(10, 1), (10, 2)]), log([(10, 3), (10, 4)], "b")
    turned = replace(b, requests=b.requests[::-1])
    assert match_prompts(a, turned)[1] == b.requests
    with pytest.raises(UserError, match="4 prompts are in one of a and b alone"):
        match_prompts(a, log([(10, 3), (10, 4)], "b", "q"))
    with pytest.raises(UserError, match="a prompt twice"):
        match_prompts(a, replace(b, requests=[b.requests[0]] * 2))
    with pytest.raises(UserError, match="totals of a server"):
        match_prompts(a, read_log(str(LOGS / "vllm_after.txt")))


# ---- the command ----


def test_the_command_prints_both_figures_and_writes_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, files = tmp_path / "out.json", [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, rounds in zip(
        files, ([[[4, 1]] * 9, [[4, 4]]], [[[4, 0]] * 9, [[4, 4]]]), strict=True
    ):
        file.write_text("".join(outputs(x, id=str(i)) for i, x in enumerate(rounds)))
    rescore.main(rescore.RescoreConfig(*map(str, files), json=str(out)))
    text = capsys.readouterr().out
    for shown in ("pooled [95 %]", "mean of requests [95 %]", "2.300", "3.500", "1.400", "3.000"):
        assert shown in text
    assert "report.json has τ cut at the end of answers" in text
    assert "2 prompts are too few to tell these two numbers apart: the difference is 0.900" in text
    result = json.loads(out.read_text())
    assert [x["engine"] for x in result["logs"]] == ["draftsmith", "draftsmith"]
    assert result["comparison"]["differences"]["tau"]["difference"] == pytest.approx(0.9)


def test_the_command_prints_what_a_dump_cannot_give_as_a_dash(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches a gauge of the last interval among the figures of the run."""
    rescore.main(rescore.RescoreConfig(str(LOGS / "sglang_metrics.txt")))
    lines = capsys.readouterr().out.splitlines()
    (gauge,) = (line for line in lines if "sglang:spec_accept_length" in line)
    assert "last interval" in gauge
    assert "2.900" in gauge
    (alpha,) = (line for line in lines if "α" in line)
    assert "–" in alpha
