"""Each planted defect is found under its name, in the rows that have it; a clean set has no grave finding."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.train.doctor_checks.sets import (
    CHATML,
    END,
    REASONING,
    ROWS,
    clean_rows,
    examine,
    graves,
    row_of,
    save_set,
    save_target,
    text_row,
    words,
)
from train.data.sample_store import SampleRow
from train.data.sources import evaluation_texts

Tokenizer = PreTrainedTokenizerFast
Rows = list[SampleRow]
PLACES = (4, 7, 11)
"""Rows of the set, of one turn each, in which a defect is planted."""


@dataclass(frozen=True)
class Planted:
    """A defect, the finding that names it, and what that finding says."""

    name: str
    severity: str
    plant: Callable[[Tokenizer, Rows], None]
    says: str = ""
    rows: int = len(PLACES)


def move_begin(by: int) -> Callable[[Tokenizer, Rows], None]:
    def plant(_: Tokenizer, rows: Rows) -> None:
        for i in PLACES:
            rows[i]["loss_spans"][0][0] += by

    return plant


def leave_end_out_of_the_mask(_: Tokenizer, rows: Rows) -> None:
    for i in PLACES:
        rows[i]["loss_spans"][-1][1] -= 1


def drop_end(_: Tokenizer, rows: Rows) -> None:
    for i in PLACES:
        rows[i]["input_ids"] = rows[i]["input_ids"][:-1]
        rows[i]["loss_spans"][-1][1] -= 1


def cut_off(tokenizer: Tokenizer, rows: Rows) -> None:
    drop_end(tokenizer, rows)
    for i in PLACES:
        rows[i]["finish_reason"] = "length"


def add_loops(tokenizer: Tokenizer, rows: Rows) -> None:
    for i in PLACES:
        replace(tokenizer, rows, i, words(f"u{i}", 6), "so it is, " * 20)


def ask_an_evaluation_prompt(tokenizer: Tokenizer, rows: Rows) -> None:
    texts = [text for text in evaluation_texts() if len(text) < 300]
    for i, text in zip(PLACES, texts, strict=False):
        replace(tokenizer, rows, i, text, words(f"a{i}", 20))


def say_a_special_token(tokenizer: Tokenizer, rows: Rows) -> None:
    for i in PLACES:
        replace(tokenizer, rows, i, words(f"u{i}", 6), "zqone <5> zqtwo")


def use_foreign_ids(tokenizer: Tokenizer, rows: Rows) -> None:
    for i in PLACES:
        rows[i]["input_ids"] = [*rows[i]["input_ids"][:-1], len(tokenizer) + 5]


def leave_the_generation_prompt_out(tokenizer: Tokenizer, rows: Rows) -> None:
    for i in PLACES:
        said = words(f"a{i}", 5)
        rows[i] = text_row(tokenizer, f"r{i}", f"<2>user\n{words(f'u{i}', 6)}<1>\n", f"{said}<1>")


def change_the_prompt(tokenizer: Tokenizer, rows: Rows) -> None:
    """White space that the template trims."""
    for i in PLACES:
        asked = f"<2>user\n  {words(f'u{i}', 6)} <1>\n<2>assistant\n"
        rows[i] = text_row(tokenizer, f"r{i}", asked, f"{words(f'a{i}', 5)}<1>")


def replace(tokenizer: Tokenizer, rows: Rows, i: int, asked: str, said: str) -> None:
    """Row i asks and says something else."""
    chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    rows[i] = row_of(tokenizer, chat)


PLANTED = [
    Planted("mask begins at the wrong token", "stops", move_begin(1), "(by +1; 3 too late, 0"),
    Planted("mask begins at the wrong token", "stops", move_begin(-1), "(by -1; 0 too late, 3"),
    Planted("EOS is not supervised", "stops", leave_end_out_of_the_mask, "3 ends"),
    Planted("EOS is not supervised", "stops", drop_end, "12.5 %"),
    Planted("answers cut off", "costs", cut_off, "12.5 %"),
    Planted("loops", "costs", add_loops, "of the supervised tokens are loops"),
    Planted("evaluation prompt in the data", "costs", ask_an_evaluation_prompt, "12.5 %"),
    Planted("special token inside a reply", "costs", say_a_special_token, "end ('<5>')"),
    Planted("tokens outside the vocabulary", "stops", use_foreign_ids, "12.5 %"),
    Planted("reply without generation prompt", "stops", leave_the_generation_prompt_out, "assistant"),
]  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: p.plant.__name__ + p.says[:8])
def test_a_planted_defect_is_found(planted: Planted, tmp_path: Path) -> None:
    tokenizer = save_target(tmp_path / "target")
    rows = clean_rows(tokenizer)
    planted.plant(tokenizer, rows)
    result = examine(tmp_path / "target", save_set(tmp_path / "set", tokenizer, rows))
    finding = result["found"][planted.name]
    assert (finding["severity"], finding["rows"]) == (planted.severity, planted.rows)
    assert set(finding["examples"]) == {rows[i]["id"] for i in PLACES}
    assert planted.says in finding["cost"]
    assert graves(result) == [planted.name]


def test_a_clean_set_has_no_grave_finding(tmp_path: Path) -> None:
    """Bug: a check that cries wolf, at templates, several turns, or a set that is fine."""
    tokenizer = save_target(tmp_path / "target")
    folder = save_set(tmp_path / "set", tokenizer, clean_rows(tokenizer))
    result = examine(tmp_path / "target", folder, "--strict", "true")
    assert graves(result) == []
    assert result["findings"] == []


def test_a_template_that_rewrites_history(tmp_path: Path) -> None:
    """Bug: rows with thoughts in earlier turns, which the target never sees again, look like any others."""
    tokenizer = save_target(tmp_path / "target", REASONING)
    rows = clean_rows(tokenizer)
    for i in PLACES:
        first = f"<think>\nzqwhy{i}\n</think>\n\n{words(f'a{i}', 5)}<1>"
        between = f"\n<2>user\n{words(f'v{i}', 4)}<1>\n<2>assistant\n"
        rows[i] = text_row(
            tokenizer, f"r{i}", f"<2>user\n{words(f'u{i}', 6)}<1>\n<2>assistant\n", first, between,
            f"{words(f'b{i}', 5)}<1>",
        )  # fmt: skip
    result = examine(tmp_path / "target", save_set(tmp_path / "set", tokenizer, rows))
    assert graves(result) == ["template rewrites history"]
    finding = result["found"]["template rewrites history"]
    assert (finding["rows"], set(finding["examples"])) == (3, {f"r{i}#0" for i in PLACES})
    assert finding["mend"] == "sample with --turns last"
    assert result["template"]["thoughts of earlier turns"] == "dropped"
    assert result["template"]["enable_thinking"] == "changes the prompt"


def test_a_set_sampled_without_thinking(tmp_path: Path) -> None:
    """Bug: the template's other mode looks like another template, or like a mask that begins too late."""
    tokenizer = save_target(tmp_path / "target", REASONING)
    rows = [
        text_row(
            tokenizer, f"r{i}",
            f"<2>user\n{words(f'u{i}', 6)}<1>\n<2>assistant\n<think>\n</think>\n", f"{words(f'a{i}', 5)}<1>",
        )
        for i in range(ROWS)
    ]  # fmt: skip
    result = examine(tmp_path / "target", save_set(tmp_path / "set", tokenizer, rows))
    assert graves(result) == []


def test_bos_twice(tmp_path: Path) -> None:
    tokenizer = save_target(tmp_path / "target", "<3>" + CHATML, bos=True)
    rows = clean_rows(tokenizer)
    folder = save_set(tmp_path / "clean", tokenizer, rows)
    assert graves(examine(tmp_path / "target", folder)) == []
    for i in PLACES:
        rows[i]["input_ids"] = [3, *rows[i]["input_ids"]]
        rows[i]["loss_spans"] = [[a + 1, b + 1] for a, b in rows[i]["loss_spans"]]
    result = examine(tmp_path / "target", save_set(tmp_path / "set", tokenizer, rows))
    assert graves(result) == ["BOS twice"]
    assert result["found"]["BOS twice"]["rows"] == 3


def test_a_turn_that_does_not_end(tmp_path: Path) -> None:
    """Bug: generation_config.json lacks the template's end of turn, and every answer runs to the limit."""
    tokenizer = save_target(tmp_path / "target", ends=[0])
    folder = save_set(tmp_path / "set", tokenizer, clean_rows(tokenizer))
    result = examine(tmp_path / "target", folder)
    assert "'<1>'" in result["found"]["a turn's end is no EOS"]["cost"]
    assert result["found"]["a turn's end is no EOS"]["severity"] == "stops"
    assert result["found"]["EOS is not supervised"]["rows"] == ROWS


def test_a_template_that_refuses_everything(tmp_path: Path) -> None:
    tokenizer = save_target(tmp_path / "target")
    folder = save_set(tmp_path / "set", tokenizer, clean_rows(tokenizer))
    save_target(tmp_path / "target", "{{ raise_exception('never') }}")
    result = examine(tmp_path / "target", folder)
    assert result["found"]["template refuses a simple chat"]["severity"] == "stops"
    assert result["template"] == {}


def test_a_set_of_another_template(tmp_path: Path) -> None:
    """Bug: the template of a target is changed after sampling, and what is served differs from what was learned."""
    trimming = CHATML.replace("m['content']", "m['content'] | trim")
    tokenizer = save_target(tmp_path / "target", trimming)
    rows = clean_rows(tokenizer)
    change_the_prompt(tokenizer, rows)
    folder = save_set(tmp_path / "set", tokenizer, rows, template=CHATML)
    result = examine(tmp_path / "target", folder)
    assert set(graves(result)) == {
        "made with another chat template",
        "prompt is rendered otherwise",
    }
    assert result["found"]["prompt is rendered otherwise"]["rows"] == 3


def test_training_s_limit(tmp_path: Path) -> None:
    """Bug: labels that training cuts are not told, or a set without any is a note."""
    tokenizer = save_target(tmp_path / "target")
    rows = clean_rows(tokenizer)
    folder = save_set(tmp_path / "set", tokenizer, rows)
    result = examine(tmp_path / "target", folder, "--max_length", 80)
    lost = sum(max(0, end - max(start, 80)) for row in rows for start, end in row["loss_spans"])
    labels = result["parts"]["Sampled set"]["labels"]
    assert labels == sum(end - start for row in rows for start, end in row["loss_spans"])
    cost = result["found"]["rows longer than training reads"]["cost"]
    assert cost.startswith(f"{100 * lost / labels:.1f} %")
    few = examine(tmp_path / "target", folder, "--worth", 0.9)
    assert few["found"]["few supervised tokens"]["severity"] == "costs"
    for row in rows:
        row["loss_spans"] = []
    none = examine(tmp_path / "target", save_set(tmp_path / "none", tokenizer, rows))
    assert none["found"]["few supervised tokens"]["severity"] == "stops"


def test_the_loops_share_is_that_of_the_tokens(tmp_path: Path) -> None:
    tokenizer = save_target(tmp_path / "target")
    rows = clean_rows(tokenizer)
    add_loops(tokenizer, rows)
    result = examine(tmp_path / "target", save_set(tmp_path / "set", tokenizer, rows))
    labels = sum(end - start for row in rows for start, end in row["loss_spans"])
    looping = 3 * 19 * len("so it is, ")
    assert result["found"]["loops"]["cost"].startswith(f"{100 * looping / labels:.1f} % of the sup")
    assert END in rows[PLACES[0]]["input_ids"]


def test_several_sets_and_the_strict_exit(tmp_path: Path) -> None:
    """Bug: only the first set is read, or ids do not say which set they are of."""
    tokenizer = save_target(tmp_path / "target")
    rows = clean_rows(tokenizer)
    sets: list[dict[str, Any]] = [{"path": str(save_set(tmp_path / "a", tokenizer, rows))}]
    move_begin(1)(tokenizer, rows)
    sets.append({"path": str(save_set(tmp_path / "b", tokenizer, rows))})
    result = examine(tmp_path / "target", sets)
    finding = result["found"]["mask begins at the wrong token"]
    assert finding["examples"] == [f"1/{rows[i]['id']}" for i in PLACES]
    assert (finding["rows"], finding["of"]) == (3, 2 * ROWS)
