"""The setting `template` and rows' own arguments from prompts to published drafts, with the real commands."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from decode.checkpoints.draft_folder import METADATA_FILE, trained_templates
from decode.common.chat import render
from decode.common.chat.choice import with_template
from decode.common.chat.render import ChatTemplate
from decode.model.loading import Target, load_target, load_tokenizer
from eval.tasks.loading import Task, load_task_prompts, with_later_turns
from tests import worlds
from tests.rows import file_sources, save_byte_target, write_rows
from tests.train.doctor_checks.sets import examine, graves
from tests.worlds import Done, byte_tokenizer
from train.data import mixture, sample_store
from train.data.conversations import conversation_with_replies, make_prompt
from train.data.manifest import RowTemplate, read_manifest
from train.doctor_checks import examination
from train.settings.training import AcceptanceEvalConfig
from train.trainer.acceptance_eval import AcceptanceEval

BODY = "{% for m in messages %}<2>{{ m['role'] }}\n{{ m['content'] }}<1>\n{% endfor %}"
SWITCH = (
    "{% if add_generation_prompt %}<2>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n</think>\n{% endif %}{% endif %}"
)
TEMPLATES = {
    "default": BODY + SWITCH,
    "tool_use": "<3>{{ tools | length }}" + BODY + SWITCH,
    "dated": "<4>{{ date }}" + BODY + "{% if add_generation_prompt %}<2>assistant\n{% endif %}",
}
OFF = {"enable_thinking": False}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
ROWS: list[dict[str, Any]] = [
    {"prompt": "zq one"},
    {"prompt": "zq one", "chat_template_kwargs": {"enable_thinking": False}},
    {"prompt": "zq one", "chat_template_kwargs": '{"enable_thinking": true}'},
    {"prompt": "zq two", "chat_template_kwargs": {"enable_thinking": False, "unread": "x"}},
    {"messages": [{"role": "user", "content": "zq three"}], "chat_template_kwargs": None},
    {"messages": [{"role": "user", "content": "zq four"}], "tools": TOOLS},
    {"prompt": "zq five", "chat_template_kwargs": {"enable_thinking": None}},
    {"prompt": "zq six", "chat_template_kwargs": {}},
]  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with three templates, one of which needs a date."""
    return save_byte_target(tmp_path_factory.mktemp("world") / "target", TEMPLATES)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """The setting `sources` for a file with these rows."""
    return file_sources(write_rows(path, rows))


def sample(target: Path, folder: Path, rows: list[dict[str, Any]], *more: object) -> Done:
    return worlds.call(
        "train/sample.py", "--target", target, "--sources", write(folder / "rows.jsonl", rows),
        "--out", folder / "out", "--max_new_tokens", 2, "--filters.min_answer", 1, *more,
    )  # fmt: skip


def rendered(target: Path, row: dict[str, Any], **setting: Any) -> str:
    """The prompt as transformers renders it with the setting and the row's own arguments above it."""
    tokenizer = load_tokenizer(str(target))
    own = row.get("chat_template_kwargs") or {}
    own = json.loads(own) if isinstance(own, str) else own
    own = {key: value for key, value in own.items() if value is not None}
    chat = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    text: str = tokenizer.apply_chat_template(
        chat, tools=row.get("tools"), tokenize=False, add_generation_prompt=True, **(setting | own)
    )
    return text


def prompts_in(target: Path, out: Path) -> list[str]:
    """The text before each row's answer."""
    tokenizer = load_tokenizer(str(target))
    rows = sample_store.read_shards(out)
    return sorted(tokenizer.decode(row["input_ids"][: row["loss_spans"][0][0]]) for row in rows)


SETTINGS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "none given": ([], {}),
    "thoughts off": (["--template", "{enable_thinking: false}"], OFF),
    "dotted": (["--template.enable_thinking", "false"], OFF),
    "by name": (["--template", "tool_use"], {"name": "tool_use"}),
    "both": (["--template", "{name: dated, date: 2026-01-31}"], {"name": "dated", "date": "2026-01-31"}),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_prompts_are_those_of_the_setting(target: Path, tmp_path: Path, case: str) -> None:
    """Bug: a traceback after all sampling (several templates), no setting, a row's own arguments that are ignored."""
    words, setting = SETTINGS[case]
    rows = ROWS if setting.get("name") != "tool_use" else [ROWS[5]]
    sample(target, tmp_path, rows, *words).ok()
    given = {"chat_template" if key == "name" else key: value for key, value in setting.items()}
    # a null or an empty mapping says nothing, so that "zq five" and "zq six" are as the setting says
    right = sorted(rendered(target, row, **given) for row in rows)
    assert prompts_in(target, tmp_path / "out") == right
    made = read_manifest(tmp_path / "out")
    assert made.template == setting
    assert made.chat_template_hash is not None
    assert made.counts["answered"] == len(rows)


def test_what_rows_had_of_their_own_is_kept(target: Path, tmp_path: Path) -> None:
    """Bug: two modes of one prompt count as a repeat, and the set does not say which row had which."""
    sample(target, tmp_path, ROWS, "--template", "{enable_thinking: true}").ok()
    rows = sample_store.read_shards(tmp_path / "out")
    kept = [
        json.loads(row["chat_template_kwargs"]) for row in rows if "chat_template_kwargs" in row
    ]
    own = [{**OFF, "unread": "x"}, OFF, {"enable_thinking": True}]
    assert sorted(kept, key=str) == sorted(own, key=str)
    made = read_manifest(tmp_path / "out")
    assert made.row_templates[0] == RowTemplate(arguments={}, prompts=5)
    counted = [(entry.arguments, entry.prompts) for entry in made.row_templates[1:]]
    assert sorted(counted, key=str) == sorted([(one, 1) for one in own], key=str)
    assert made.templates()[0] == {"enable_thinking": True}
    assert {**OFF, "unread": "x"} in made.templates()


def test_a_stopped_run_goes_on_with_the_same_prompts(target: Path, tmp_path: Path) -> None:
    """Bug: rows that are made again lose their arguments."""
    words = ("--shard_rows", 1, "--template", "{enable_thinking: false}")
    assert sample(target, tmp_path, ROWS, *words).code == 0
    before = {row["id"]: row for row in sample_store.read_shards(tmp_path / "out")}
    for shard in sample_store.shard_paths(tmp_path / "out")[:4]:
        shard.unlink()
    (tmp_path / "out" / "manifest.json").unlink()
    assert sample(target, tmp_path, ROWS, *words).code == 0
    after = {row["id"]: row for row in sample_store.read_shards(tmp_path / "out")}
    assert {name: list(row["input_ids"]) for name, row in after.items()} == {
        name: list(row["input_ids"]) for name, row in before.items()
    }
    kept = [row.get("chat_template_kwargs") for row in after.values()]
    assert kept.count(None) == 5


REFUSED: dict[str, tuple[list[object], str]] = {
    "unknown name": (["--template", "rag"], "'rag': choose among dated, default, tool_use"),
    "unread argument": (["--template", "{thinking: false}"], "does not read thinking; it reads enable_thinking"),
    "nobody gave it": (["--template", "dated"], "needs date, which nobody gave: add --template '{date: …}'"),
    "nobody gave it, texts": (
        ["--template", "dated", "--origin", "text"], "needs date, which nobody gave: add --template '{date: …}'",
    ),
    "reserved": (["--template", "{tools: []}"], "tools is no argument that can be given"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_fail_later_fails_before_sampling(
    target: Path, tmp_path: Path, case: str
) -> None:
    """Bug: Jinja prints nothing for what is undefined, and the answers are to prompts with a hole."""
    words, line = REFUSED[case]
    rows = [{**row, "completion": "yes"} for row in ROWS if "prompt" in row]
    assert line in sample(target, tmp_path, rows, *words).error()
    assert not (tmp_path / "out").exists()


def test_no_default_is_said_before_sampling(target: Path, tmp_path: Path) -> None:
    shutil.copytree(target, tmp_path / "t")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"b": TEMPLATES["default"], "a": "x"}
    for file in [*(tmp_path / "t").glob("*.jinja"), *(tmp_path / "t").rglob("*/*.jinja")]:
        file.unlink()
    tokenizer.save_pretrained(tmp_path / "t")
    error = sample(tmp_path / "t", tmp_path, ROWS).error()
    assert "has the chat templates a, b, and none is the default: choose one" in error
    assert not (tmp_path / "out").exists()


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "a text": ({"chat_template_kwargs": "off"}, "`chat_template_kwargs` must be an object"),
    "a list": ({"chat_template_kwargs": [1]}, "`chat_template_kwargs` must be an object"),
    "a parameter": ({"chat_template_kwargs": {"tokenize": True}}, "tokenize is no argument"),
    "a name": ({"chat_template_kwargs": {"a-b": 1}}, "'a-b' cannot be the name of an argument"),
    "its date is missing": ({}, "needs date, which nobody gave"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_row_with_bad_arguments_costs_itself(target: Path, tmp_path: Path, case: str) -> None:
    """Rows give what the template needs; the one that does not is named and skipped."""
    bad, line = BAD_ROWS[case]
    good = [{"prompt": f"zq {i}", "chat_template_kwargs": {"date": f"day {i}"}} for i in range(6)]
    rows = [*good, {"prompt": "zq bad", **bad}]
    done = sample(target, tmp_path, rows, "--template", "dated", "--max_bad_rows", 0.3).ok()
    assert any("rows.jsonl:7" in said and line in said for said in done.err.splitlines())
    right = sorted(rendered(target, row, chat_template="dated") for row in good)
    assert prompts_in(target, tmp_path / "out") == right


def test_answers_of_two_templates_are_not_mixed(target: Path, tmp_path: Path) -> None:
    """Bug: a set that goes on with other settings, or with another template in the target's folder, is a mixture."""
    mine = tmp_path / "t"
    shutil.copytree(target, mine)
    assert sample(mine, tmp_path, ROWS[:2]).code == 0
    changed = sample(
        mine, tmp_path, ROWS, "--resume", "true", "--template", "{enable_thinking: false}"
    )
    assert "are of another target (chat template " in changed.error()
    template = mine / "chat_template.jinja"
    template.write_text(template.read_text() + "\n")
    assert "are of another target (chat template " in sample(mine, tmp_path, ROWS[:2]).error()
    sample(mine, tmp_path, ROWS[:2], "--allow_changed", "true").ok()


def test_texts_of_two_templates_are_not_mixed(target: Path, tmp_path: Path) -> None:
    """Bug: texts that are added to a set are rendered or tokenised otherwise than those that are there."""
    mine = tmp_path / "t"
    shutil.copytree(target, mine)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"zq {i}"},
                {"role": "assistant", "content": "yes"},
            ]
        }
        for i in range(4)
    ]
    texts = "--origin", "text"
    assert sample(mine, tmp_path, rows[:2], *texts).code == 0
    assert sample(mine, tmp_path, rows[:3], *texts).code == 0
    template = mine / "chat_template.jinja"
    template.write_text("A day. " + template.read_text())
    changed = sample(mine, tmp_path, rows, *texts)
    assert "have other tokens than now: tokenizer or chat template is another" in changed.error()
    sample(mine, tmp_path, rows, *texts, "--allow_changed", "true").ok()


def test_the_doctor_reads_sets_as_they_were_rendered(target: Path, tmp_path: Path) -> None:
    """Bug: rows of another mode or of a named template count as no rendering of the target's."""
    words = {"name": "dated", "date": "2026-01-31"}
    dated, switched = tmp_path / "dated", tmp_path / "switched"
    rows = [{"prompt": f"zq {i}"} for i in range(6)]
    own = [{**row, "chat_template_kwargs": OFF} for row in rows[:3]]
    for folder, some, setting in ((dated, rows, words), (switched, [*rows, *own], {})):
        folder.mkdir()
        sample(target, folder, some, "--template", json.dumps(setting)).ok()
    data = json.dumps([{"path": str(dated / "out")}, {"path": str(switched / "out")}])
    suspicious = {
        "made with another chat template", "prompt is rendered otherwise", "reply without generation prompt",
        "template refuses a simple chat",
    }  # fmt: skip
    for some in (data, dated / "out", switched / "out"):
        found = examine(target, some)
        assert suspicious.isdisjoint(found["found"]), found["found"].keys()
    assert (
        examine(target, dated / "out")["template"]["settings"]
        == '\'{name: "dated", date: "2026-01-31"}\''
    )
    other = examine(target, switched / "out", "--template", "{enable_thinking: false}")
    detail = other["found"]["made with another chat template"]
    assert (
        "with --template the tokenizer's own, and this is '{enable_thinking: false}'"
        in json.dumps(detail)
    )
    prompts = examine(
        target, "", "--sources", write(tmp_path / "p.jsonl", ROWS), "--template", "dated"
    )
    assert "needs date, which nobody gave" in json.dumps(
        prompts["found"]["template refuses a simple chat"]
    )
    mended = ("--template", "{name: dated, date: x}")
    assert (
        graves(examine(target, "", "--sources", write(tmp_path / "p.jsonl", ROWS[:1]), *mended))
        == []
    )


def test_the_doctor_looks_at_so_many_arguments(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a set with a date in each row takes hours, or its other rows count as defects."""
    rows = [{"prompt": f"zq {i}", "chat_template_kwargs": {"date": f"day {i}"}} for i in range(8)]
    assert sample(target, tmp_path, rows, "--template", "dated").code == 0
    grave = graves(examine(target, tmp_path / "out"))
    assert "template refuses a simple chat" not in grave
    monkeypatch.setattr(examination, "MOST_RENDERINGS", 3)
    calls: list[Any] = []
    probe = render.probe_template
    monkeypatch.setattr(render, "probe_template", lambda *a: calls.append(a) or probe(*a))
    assert graves(examine(target, tmp_path / "out")) == grave
    assert len(calls) == 3


def test_training_and_evaluation_use_the_sets_settings(target: Path, tmp_path: Path) -> None:
    """Bug: acceptance is measured on prompts of another mode than the draft learns and is served in."""
    sets = []
    for i, setting in enumerate(({}, OFF)):
        folder = tmp_path / f"s{i}"
        folder.mkdir()
        assert (
            sample(target, folder, ROWS[:1] + ROWS[6:], "--template", json.dumps(setting)).code == 0
        )
        sets.append({"path": str(folder / "out")})
    data = json.dumps(sets[1:])
    out = tmp_path / "draft"
    words: list[object] = [
        "--target", target, "--data", data, "--out", out, "--draft.init", target,
        "--loop.steps", 1, "--loop.batch_size", 2, "--loop.micro_batch", 2,
        "--check.prompts", 3, "--check.k", 1, "--check.max_new_tokens", 2,
    ]  # fmt: skip
    for again in ("false", "true"):  # the templates in the folder are this command's own
        done = worlds.call("train/distill.py", *words, "--overwrite", again).ok()
    assert load_tokenizer(str(out)).chat_template == TEMPLATES
    assert json.loads((out / METADATA_FILE).read_text())["templates"] == [OFF]
    assert trained_templates([str(out)]) == {str(out): [OFF]}
    loaded = load_target(str(target), "cpu")
    both = mixture.templates_of([mixture.MixturePart(one["path"]) for one in sets])
    assert both == [{}, OFF]
    measured = AcceptanceEval(AcceptanceEvalConfig(prompts=6), loaded, 0, templates=both)
    texts = [loaded.tokenizer.decode(ids) for ids in measured.prompts]
    assert [text.endswith("<think>\n</think>\n") for text in texts] == [False, True] * 3
    # evaluation and generation: from the draft, with a line; another one with a warning
    done = worlds.call(
        "eval/run.py", "--target", target, "--methods", json.dumps([{"name": "causal", "draft": str(out)}]),
        "--tasks", json.dumps([{"name": "own", "path": str(tmp_path / "s1" / "rows.jsonl")}]), "--k", 1,
        "--temperatures", "[0]", "--max_new_tokens", 3, "--phase_prompts", 0, "--out", tmp_path / "report",
    ).ok()  # fmt: skip
    assert (
        "prompts are rendered with --template '{enable_thinking: false}', as in the training"
        in done.err
    )
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["target"]["template"] == OFF
    lines = [
        json.loads(x) for x in (tmp_path / "report" / "outputs.jsonl").read_text().splitlines()
    ]
    right = sorted(rendered(target, row, **OFF) for row in ROWS[:1] + ROWS[6:])
    found = sorted({loaded.tokenizer.decode(line["prompt_ids"]) for line in lines})
    assert found == right
    done = worlds.call(
        "decode/generate.py", "--target", target, "--prompt", "zq one", "--draft", out, "--k", 1,
        "--template", "{enable_thinking: true}", "--max_new_tokens", 2,
    ).ok()  # fmt: skip
    assert "was trained on prompts rendered with '{enable_thinking: false}'" in done.err
    assert "and these are rendered with '{enable_thinking: true}'" in done.err


THINKING = (  # as Qwen3's: without thoughts the last reply begins with empty ones, which the switch puts in the prompt
    "{% for m in messages %}<2>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n</think>\n{% endif %}{{ m.content }}<1>\n{% endfor %}"
    + SWITCH
)


@pytest.mark.parametrize("setting", [{}, OFF, {"enable_thinking": True}])
@pytest.mark.parametrize("own", [None, OFF, {"enable_thinking": True}])
def test_texts_are_cut_where_the_target_would_begin(
    setting: dict[str, Any], own: dict[str, Any] | None
) -> None:
    """Bug: labels of origin text begin with what a server would have put into the prompt."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING
    prompt = make_prompt("s", ("zq hi", "yes"), None, own)
    chosen = ChatTemplate(with_template(tokenizer, setting))
    found = conversation_with_replies(chosen, prompt, "last", frozenset({1}))
    off = {**setting, **(own or {})} == OFF
    asked, thoughts = "<2>user\nzq hi<1>\n<2>assistant\n", "<think>\n</think>\n"
    assert tokenizer.decode(found.prompt_segments[0]) == asked + thoughts * off
    assert tokenizer.decode(found.replies[0]) == thoughts * (not off) + "yes<1>"


def task_target(target: Path, setting: Any) -> Target:
    return load_target(str(target), "cpu").with_template(setting)


def test_tasks_have_the_rows_own_arguments_in_every_turn(target: Path, tmp_path: Path) -> None:
    """Bug: evaluation renders a row otherwise than training, or drops its arguments behind the first turn."""
    path = tmp_path / "chats.jsonl"
    rows = [
        {"turns": ["zq a", "zq b"], "chat_template_kwargs": OFF},
        {"turns": ["zq a", "zq b"]},
        {"prompt": "zq a", "chat_template_kwargs": json.dumps({"enable_thinking": True})},
        {"prompt": "zq a"},
    ]
    write(path, rows)
    used = task_target(target, {"enable_thinking": True})
    items = load_task_prompts(Task("own", path=str(path)), used)
    assert len({item.id for item in items}) == 4
    later = with_later_turns(items, used, {"own": "refuse"}, lambda some: [[20, 21] for _ in some])
    texts = {item.id: used.tokenizer.decode(item.prompt_ids) for item in later}
    thoughtless = [name for name, text in texts.items() if text.endswith("<think>\n</think>\n")]
    assert sorted(thoughtless) == sorted([items[0].id, f"{items[0].id}:2"])
    assert texts[items[1].id] == rendered(target, {"prompt": "zq a"})
