"""Grammars by llguidance: its matcher for a real tokenizer, the settings of commands, and whole answers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from decode import generate
from decode.common.errors import UserError
from decode.constraints.grammar import ConstraintConfig, Matcher, build_matcher
from decode.constraints.rows import RowConstraints
from decode.drafts.registry import load_draft, pick_draft
from decode.drafts.settings import GenerateConfig
from decode.engine.engine import decode
from decode.model.loading import Target, load_target
from decode.verification.sampling import SamplingParams
from eval.benchmark import config
from eval.settings.evaluation import EvalConfig, MethodConfig, TreeConfig
from tests import worlds
from tests.worlds import World

pytest.importorskip("llguidance")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tall": {"type": "boolean"},
    },
    "required": ["name", "age", "tall"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
INLINE = json.dumps(SCHEMA)
PROMPTS = ["user = ", "A record of a person as JSON:\n"]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("assets/target", "cpu")


def matcher_of(target: Target, **settings: str) -> Matcher:
    found = build_matcher(ConstraintConfig(**settings), target)
    assert found is not None
    return found


def ids_of(target: Target, text: str) -> list[int]:
    ids: list[int] = target.tokenizer(text)["input_ids"]
    return ids


def check_person(text: str) -> None:
    """Asserts that it is JSON of SCHEMA."""
    value = json.loads(text)
    assert list(value) == ["name", "age", "tall"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 8
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 99
    assert isinstance(value["tall"], bool)


def test_a_matcher_moves_along_a_text_and_back(target: Target) -> None:
    """Catches a mask of another place after a rollback, a copy that moves with the original, EOS where the text cannot
    end, and masks whose bits are in another order."""
    matcher, text = matcher_of(target, json_schema=INLINE), '{"name":"Bo","age":7,"tall":true}'
    ids, eos = ids_of(target, text), sorted(target.eos)
    masks = []
    for token in ids:
        masks.append(matcher.allowed())
        assert bool(masks[-1][token])
        assert not bool(masks[-1][eos].any())
        assert matcher.advance([token]) == 1
    end, other = matcher.allowed(), matcher.copy()
    assert end.nonzero()[:, 0].tolist() == eos
    matcher.rollback(len(ids))
    assert matcher.allowed().equal(masks[0])
    assert other.allowed().equal(end)
    assert matcher.advance([*ids[:3], ids[0], ids[3]]) == 3
    assert matcher.allowed().equal(masks[3])


def test_forced_tokens_are_the_tokenizers_own(target: Target) -> None:
    """Catches runs that end early: the key between two values is forced, and written as the tokenizer writes it."""
    rows = RowConstraints(1, target.runner.vocab_size, target.eos)
    rows.start(0, matcher_of(target, json_schema=INLINE))
    start = ids_of(target, '{"name":"')
    forced = rows.forced_after(0, (), 20)
    assert forced == start[: len(forced)]
    assert len(forced) >= 3
    key = rows.forced_after(0, ids_of(target, '{"name":"Bo",'), 20)
    assert target.tokenizer.decode(key) == '"age":'
    last = rows.forced_after(0, ids_of(target, '{"name":"Bo","age":7,"tall":true}'), 20)
    assert last == sorted(target.eos)


@pytest.mark.parametrize("draft", ["grammar", "assets/draft"])
def test_answers_are_json_of_the_schema(draft: str, target: Target) -> None:
    """Catches a mask that lets through what is not JSON, and speculation that changes greedy text."""
    matchers = [matcher_of(target, json_schema=INLINE)] * len(PROMPTS)
    prompts = [ids_of(target, prompt) for prompt in PROMPTS]
    for sampling in (SamplingParams(), SamplingParams(1.5)):
        outputs = decode(
            target, pick_draft(draft, target), prompts, k=3, matchers=matchers, sampling=sampling,
            max_new_tokens=60,
        )  # fmt: skip
        for output in outputs:
            assert output.finish_reason == "eos"
            check_person(target.tokenizer.decode(output.output_ids, skip_special_tokens=True))
        if sampling.greedy:
            plain = decode(target, None, prompts, matchers=matchers, max_new_tokens=60)
            assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]
        assert all(sum(output.forced) > 0 for output in outputs)


def test_regular_expressions_and_lark_grammars(target: Target, tmp_path: Path) -> None:
    """Catches a kind of grammar that is read as another one."""
    file = tmp_path / "list.lark"
    file.write_text('start: item ("," item)*\nitem: /[a-c]{2}/\n')
    settings: dict[str, Any] = {"max_new_tokens": 30, "sampling": SamplingParams(1.0)}
    for name, value, found, start in (
        ("regex", r"[0-9]{3}-[xy]+z", r"[0-9]{3}-[xy]+z", r"[0-9]{3}-"),
        ("grammar", str(file), r"[a-c]{2}(,[a-c]{2})*", r"[a-c]{2}"),
    ):
        matchers = [matcher_of(target, **{name: value})]
        (output,) = decode(
            target, None, [ids_of(target, PROMPTS[0])], matchers=matchers, **settings
        )
        text = target.tokenizer.decode(output.output_ids, skip_special_tokens=True)
        assert output.finish_reason != "eos" or re.fullmatch(found, text)
        assert re.match(start, text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"json_schema": '{"type": "objekt"}'}, "objekt"),
        ({"json_schema": "{type: object}"}, "no JSON"),
        ({"json_schema": "none.json"}, "none.json"),
        ({"regex": "a(b"}, "regex"),
        ({"regex": "a", "json_schema": INLINE}, "json_schema and regex"),
    ],
)
def test_bad_grammars_are_errors(settings: dict[str, str], message: str, target: Target) -> None:
    """Catches a stack trace, and a grammar that is dropped in silence."""
    with pytest.raises(UserError, match=message) as error:
        build_matcher(ConstraintConfig(**settings), target)
    assert "\n" not in str(error.value)
    assert build_matcher(ConstraintConfig(), target) is None


def test_a_missing_package_is_named(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a stack trace where the extra is not installed."""
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(UserError, match="pip install 'llguidance"):
        build_matcher(ConstraintConfig(regex="a"), target)


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a setting that does not reach the engine."""
    generate.main(
        GenerateConfig(
            prompt=PROMPTS[0], draft="grammar", json_schema=INLINE, max_new_tokens=60, device="cpu"
        )
    )
    out, err = capsys.readouterr()
    check_person(out.removeprefix(PROMPTS[0]).replace("\n", ""))
    assert "forced by the grammar" in err


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("world"), prompts=3)


def test_the_report_of_a_constrained_run(world: World, tmp_path: Path) -> None:
    """Catches an evaluation whose reference, plain decoding or methods do not follow the grammar."""
    done = worlds.call(
        "eval/run.py", "--target", world.target, "--constraint.regex", "(ab|cd)[0-9]{2}xyz", "--k", 2,
        "--methods", json.dumps([{"name": "grammar"}, {"name": "causal", "draft": str(world.draft)}]),
        "--tasks", json.dumps([{"name": "few", "path": str(world.prompts)}]), "--device", "cpu",
        "--temperatures", "[0.0]", "--max_new_tokens", 12, "--phase_prompts", 0,
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.code == 0, done.err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    methods = {m["name"]: m for m in report["methods"] if m["task"] == "all"}
    assert all(m["lossless"]["identical"] == 3 for m in methods.values())
    assert methods["plain"]["finish"] == {"eos": 3}
    assert methods["grammar"]["counts"]["forced"] > 0
    assert methods["grammar"]["tau"] > 1
    assert methods["grammar"]["alpha"] is None


def test_settings_that_know_no_grammar_are_refused() -> None:
    """Catches a comparison of constrained with unconstrained text."""
    constraint = ConstraintConfig(regex="a")
    tree = MethodConfig("causal", draft="d", tree=TreeConfig(nodes=4))
    for changes, message in (
        ({"mode": "compiled"}, "choose mode eager"),
        ({"compare": "hf"}, "leave out compare"),
        ({"check_law": 100}, "check_law"),
        ({"methods": [tree]}, "chains"),
    ):
        with pytest.raises(UserError, match=message):
            config.check(EvalConfig(constraint=constraint, **changes))  # type: ignore[arg-type]


def test_the_draft_of_a_command_is_found_by_its_name(target: Target) -> None:
    """Catches the family `grammar` missing in the registry."""
    draft = pick_draft("grammar", target)
    assert draft is not None
    assert draft.name == "grammar"
    assert load_draft("assets/draft", target).name == "causal"
