"""Loaders of the field's prompt sets, on made-up rows of the same shape; prompts, domains, references, stops, turns."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import UserError
from decode.common.journal import Journal
from decode.drafts.lookup import NgramDraft
from decode.engine.engine import SpeculativeEngine, decode
from decode.model.loading import Target
from eval.benchmark.untimed_passes import load_eval_prompts
from eval.checks import answer_quality, sandbox
from eval.tasks import dataset_specs, row_files
from eval.tasks.loading import Task, TaskPrompt, load_task_prompts, task_version, with_later_turns
from eval.tasks.stop_strings import StopMatcher, collect_until_stop
from tests import worlds
from tests.decode.engine.test_text_stream import KINDS, llama, random_ids, rounds_of
from tests.rows import byte_target, save_byte_target, write_rows
from tests.worlds import EOS

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
CATEGORIES = (*MT, "translation", "summarization", "qa", "math_reasoning", "rag")

SPEC_BENCH = [
    {
        "question_id": 81 + i,
        "category": name,
        "turns": [f"Say {name}.", "Again."][: 1 + (name in MT)],
    }
    | ({"reference": ["It is 7."]} if name == "math_reasoning" else {})
    for i, name in enumerate(CATEGORIES)
]
HUMANEVAL = {
    "task_id": "Made/0",
    "prompt": 'def double(n):\n    """Twice n."""\n',
    "entry_point": "double",
    "canonical_solution": "    return n + n\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
}
ROWS: dict[str, dict[str, Any]] = {
    "mt-bench": {"question_id": 1, "category": "stem", "turns": ["One?"]},
    "humaneval": HUMANEVAL,
    "mbpp": {
        "task_id": 11, "text": "Write a function that doubles.", "code": "def d(n): return n + n",
        "test_setup_code": "", "test_list": ["assert d(2) == 4", "assert d(0) == 0"],
    },
    "gsm8k": {"question": "2 and 3?", "answer": "It is <<2+3=5>>5.\n#### 1,005"},
    "xsum": {"id": "7", "document": "A long story.", "summary": "A story."},
    "cnn-dailymail": {"id": "a1", "article": "A long story.", "highlights": "A story."},
    "wmt-en-de": {"translation": {"en": "The house.", "de": "Das Haus."}},
    "alpaca": {"instruction": "Sort.", "input": "3 1", "output": "1 3"},
    "speed-bench": {"question_id": "q7", "category": "rag", "turns": ["Look it up."]},
    "speculator-benchmarks": {"question_id": 161, "category": "translation", "prompt": "Haus"},
}  # fmt: skip
NEED_PATH = {"spec-bench", "speed-bench", "speculator-benchmarks"}
"""Recipes of files that users give: there is no copy here, and none is fetched."""
# name: (text of the prompt, id or None for a hash, domain, metric, end of the reference)
WANTED: dict[str, tuple[str, str | None, str, str, str]] = {
    "mt-bench": ("One?", "1", "stem", "", ""),
    "humaneval": (str(HUMANEVAL["prompt"]), "Made/0", "code", "code", "check(double)"),
    "mbpp": ("assert d(0) == 0\n[BEGIN]\n", "11", "code", "code", "assert d(0) == 0"),
    "gsm8k": ("Question: 2 and 3?\nAnswer:", None, "math", "number", "1,005"),
    "xsum": ("A long story.\n\nSummarize", "7", "summarization", "rouge-l", "A story."),
    "cnn-dailymail": ("A long story.\n\nSummarize", "a1", "summarization", "rouge-l", "A story."),
    "wmt-en-de": ("English: The house.\nGerman:", None, "translation", "rouge-l", "Das Haus."),
    "alpaca": ("Sort.\n\n3 1", None, "instructions", "", ""),
    "speed-bench": ("Look it up.", "q7", "rag", "", ""),
    "speculator-benchmarks": ("Haus", "161", "translation", "", ""),
}


@pytest.fixture
def target() -> Target:
    """A tiny one whose tokens are bytes, without a chat template."""
    return byte_target()


@pytest.fixture
def chatty(target: Target) -> Target:
    target.tokenizer.chat_template = TEMPLATE
    return target


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    return write_rows(folder / "rows.jsonl", rows)


def text_of(item: TaskPrompt, target: Target) -> str:
    return target.tokenizer.decode(item.prompt_ids)


def test_every_recipe_is_tried_here() -> None:
    """Bug: a data set is added, or a field of one renamed, without a row that shows what it reads."""
    own = {name for name, spec in dataset_specs.load_dataset_specs().items() if not spec.bundled}
    assert own == {*ROWS, *NEED_PATH}
    assert all(spec.version >= 1 for spec in dataset_specs.load_dataset_specs().values())


@pytest.mark.parametrize("name", ROWS)
def test_rows_become_prompts(name: str, target: Target, tmp_path: Path) -> None:
    """Bug: a field goes into the wrong place, or the reference into the prompt."""
    text, own_id, domain, metric, reference = WANTED[name]
    item = load_task_prompts(Task(name, str(write(tmp_path, [ROWS[name]]))), target)[0]
    assert text in text_of(item, target)
    if metric in ("number", "rouge-l"):
        assert reference not in text_of(item, target)
    assert own_id is None or item.id == own_id
    assert (item.domain, item.metric) == (domain, metric)
    assert item.reference.endswith(reference)


def test_the_bundled_json_task_scores_whole_values(target: Target) -> None:
    """Bug: the file beside the prompts is not found, or its answers have no metric and are not scored."""
    item = load_task_prompts(Task("json", limit=1), target)[0]
    assert "Maria Keller is 34" in text_of(item, target)
    assert (item.id, item.metric, item.domain) == ("person-01", "json", "extraction")
    ids = target.tokenizer('{"name": "Maria"}')["input_ids"]
    scores = [
        answer_quality.score_answer(item, ids[:end], target.tokenizer, run_code=False)
        for end in (len(ids), len(ids) - 1)
    ]
    assert scores == [1.0, 0.0]


@pytest.mark.parametrize("name", [*sorted(NEED_PATH), "cod"])
def test_a_task_that_needs_a_path_is_not_said_to_need_none(name: str, target: Target) -> None:
    """Bug: the error offers the very task that it refuses, or another one that has no rows of its own."""
    with pytest.raises(UserError, match="needs a path; known without one: ") as caught:
        load_task_prompts(Task(name), target)
    offered = str(caught.value).split("known without one: ")[1].split(", ")
    assert offered == sorted({"arithmetic", "code", "json", "prose", *ROWS} - NEED_PATH)


def test_a_renamed_field_is_named(target: Target, tmp_path: Path) -> None:
    """Bug: a file of another task gives empty prompts."""
    path = write(tmp_path, [{"query": "2 and 3?"}])
    with pytest.raises(UserError, match=r"rows.jsonl:1: 'question' is undefined"):
        load_task_prompts(Task("gsm8k", str(path)), target)


def test_both_kinds_of_speculator_benchmarks_are_read(chatty: Target, tmp_path: Path) -> None:
    """Bug: one file's rows are refused, asked without their second turn, or counted under no domain."""
    rows = [HUMANEVAL, {"question_id": 81, "category": "writing", "turns": ["Say a.", "Again."]}]
    task = Task("speculator-benchmarks", str(write(tmp_path, rows)))
    code, chat = load_task_prompts(task, chatty)
    assert (code.id, code.domain, code.later_turns) == ("Made/0", "code", ())
    assert (chat.id, chat.domain, chat.later_turns) == ("81", "writing", ("Again.",))


def test_a_row_without_its_text_is_refused(target: Target, tmp_path: Path) -> None:
    """Bug: speed is measured on a sentence that says where the text would be."""
    left_out = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    rows = [ROWS["speed-bench"], ROWS["speed-bench"] | {"question_id": "q8", "turns": [left_out]}]
    with pytest.raises(UserError, match=r"rows.jsonl:2 has no text of its own .*prepare_data.py"):
        load_task_prompts(Task("speed-bench", str(write(tmp_path, rows))), target)


def test_spec_bench_has_thirteen_domains_and_two_turns(chatty: Target, tmp_path: Path) -> None:
    """Bug: categories are merged, or the second turn is dropped or asked without the answer to the first."""
    task = Task("spec-bench", str(write(tmp_path, SPEC_BENCH)))
    first = load_task_prompts(task, chatty)
    assert [item.domain for item in first] == list(CATEGORIES)
    assert sum(bool(item.later_turns) for item in first) == len(MT)
    assert {item.domain: item.metric for item in first if item.metric} == {
        "math_reasoning": "number"
    }
    asked: list[str] = []

    def answers(items: Any) -> list[list[int]]:
        asked.extend(item.id for item in items)
        return [chatty.tokenizer("Yes.")["input_ids"] + [EOS[0]] for _ in items]

    both = with_later_turns(first, chatty, {"spec-bench": "refuse"}, answers)
    assert len(both) == 13 + 8
    assert asked == [str(81 + i) for i in range(8)]  # nobody answers what has no later turn
    assert [item.id for item in both[:4]] == ["81", "81:2", "82", "82:2"]
    wanted = "[user]Say writing.[assistant]Yes.[user]Again.[assistant]"
    assert text_of(both[1], chatty) == wanted
    assert both[1].domain == "writing"


def test_history_is_the_targets_own_and_kept(chatty: Target, tmp_path: Path) -> None:
    """Bug: the history is a draft's, or of another prompt of the batch; or a rerun asks again."""
    task = Task("spec-bench", str(write(tmp_path, SPEC_BENCH)), limit=3)
    journal = Journal(tmp_path / "journal.jsonl", {})
    items, failed = load_eval_prompts([task], chatty, 6, journal)
    assert (len(items), failed) == (6, [])
    for one, two in zip(items[::2], items[1::2], strict=True):
        ids = decode(chatty, None, [one.prompt_ids], max_new_tokens=6)[0].output_ids
        answer = chatty.tokenizer.decode(ids, skip_special_tokens=True)
        assert f"[assistant]{answer}[user]" in text_of(two, chatty)
        journal.put(["answer", one.task, one.id], chatty.tokenizer("Kept.")["input_ids"])
    again, _ = load_eval_prompts([task], chatty, 6, Journal(tmp_path / "journal.jsonl", {}))
    assert all("[assistant]Kept.[user]" in text_of(item, chatty) for item in again[1::2])


def test_chats_need_a_template_or_one_turn(target: Target, tmp_path: Path) -> None:
    """Bug: a base model is refused a benchmark whose first turns it can answer."""
    path = str(write(tmp_path, SPEC_BENCH))
    with pytest.raises(UserError, match="turns: 1"):
        load_task_prompts(Task("spec-bench", path), target)
    items = load_task_prompts(Task("spec-bench", path, turns=1), target)
    assert text_of(items[0], target) == "Say writing."
    assert not any(item.later_turns for item in items)


def test_chat_models_get_no_stop_strings(target: Target, tmp_path: Path) -> None:
    """Bug: a chat model's code block is cut where its function begins."""
    task = Task("humaneval", str(write(tmp_path, [HUMANEVAL])))
    assert "\ndef " in load_task_prompts(task, target)[0].stop
    target.tokenizer.chat_template = TEMPLATE
    item = load_task_prompts(task, target)[0]
    assert item.stop == ()
    assert "code block" in text_of(item, target)


def test_an_answer_ends_at_the_token_that_completes_its_stop(target: Target) -> None:
    """Bug: the end depends on how many tokens a round brought, so that the arms count differently."""
    tokenizer = target.tokenizer
    ids = tokenizer("é = 1\ndef f\ndef g")["input_ids"]
    end = StopMatcher(["\ndef "], tokenizer).add(ids)
    assert end is not None
    assert tokenizer.decode(ids[:end]) == "é = 1\ndef "
    for start in range(end):
        matcher = StopMatcher(["\ndef "], tokenizer)
        assert (matcher.add(ids[:start]), matcher.add(ids[start:])) == (None, end)
    assert StopMatcher(["\nclass "], tokenizer).add(ids) is None
    assert StopMatcher([], tokenizer).add(ids) is None


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_are_found_in_the_text(kind: str) -> None:
    """Bug: a stop string is overlooked because decoding begins inside a character or drops a space, so that an answer
    goes on behind it; or it is found where the text has none."""
    tokenizer = KINDS[kind]()
    rng = random.Random(4)
    found = 0
    while found < 40:
        ids = random_ids(tokenizer, rng)
        text = tokenizer.decode(ids)
        if not text:
            continue
        at = rng.randrange(len(text))
        stop = [text[at : at + rng.randint(1, 6)], "never"]
        ends = (n for n in range(1, len(ids) + 1) if stop[0] in tokenizer.decode(ids[:n]))
        if "\ufffd" in stop[0]:
            continue
        end = next(ends)
        assert StopMatcher(stop, tokenizer).add(ids) == end
        matcher, parts, ended = StopMatcher(stop, tokenizer), rounds_of(ids, rng), []
        for part in parts:
            if not ended:
                ended = [n for n in [matcher.add(part)] if n is not None]
        assert ended == [end]
        found += 1


def test_a_stop_string_in_a_run_of_byte_tokens() -> None:
    """Bug: the last tokens are decoded from within a character, and the whole run of bytes becomes unreadable."""
    tokenizer = llama(True)
    text = "字字字🙂字字字🛑字字"
    ids = tokenizer.convert_tokens_to_ids([f"<0x{value:02X}>" for value in text.encode()])
    assert StopMatcher(["🛑"], tokenizer).add(ids) == len("字字字🙂字字字🛑".encode())


def test_domains_and_limits_of_own_rows(target: Target, tmp_path: Path) -> None:
    rows = [{"prompt": "One\u2028?", "domain": "x"}, {"prompt": "Two", "domain": "y"}]
    path = str(write(tmp_path, rows))
    items = load_task_prompts(Task("own", path), target)
    assert [(text_of(x, target), x.domain) for x in items] == [("One\u2028?", "x"), ("Two", "y")]
    assert load_task_prompts(Task("own", path, limit=1), target) == items[:1]
    path = str(write(tmp_path, [{"turns": [3]}]))
    with pytest.raises(UserError, match="rows.jsonl:1: `turns` must be a list"):
        load_task_prompts(Task("own", path), target)


def test_values_of_other_types(target: Target, tmp_path: Path) -> None:
    """Bug: a number where the template splits a text, or a field with the name of a parameter, ends in a traceback."""
    rows = [{"question": "2?", "answer": "#### 2", "self": 1, "id": "x"}]
    task = Task("gsm8k", str(write(tmp_path, rows)))
    assert load_task_prompts(task, target)[0].id == "x"
    write(tmp_path, [{"question": "2?", "answer": 5}])
    with pytest.raises(UserError, match=r"rows.jsonl:1: .*is it a file of this task"):
        load_task_prompts(task, target)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("version: 1\nversion: 2", "'version' is set twice"),
        ("- version", "holds a list"),
        ("", "no version"),
        ("version: 1\npromt: x", "promt; fields are"),
        ("version: 1\nname: x", "name; fields are"),
        ("version: 1\nprompt: 3", "prompt is 3: it must be of type str"),
        ("version: 1\nstop: x", "stop is 'x': it must be of type list"),
        ("version: 1\nprompt: '{{ x'", "bad Jinja"),
        ("version: 1\nid: 'x y'", "bad Jinja"),
    ],
)
def test_bad_specs_are_named(text: str, reason: str, tmp_path: Path) -> None:
    """Bug: a spec with a mistake reads every row as empty, or ends in a traceback."""
    path = tmp_path / "task.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=f"task.yaml.*{reason}"):
        dataset_specs.read_dataset_spec(path)


@pytest.mark.parametrize("name", ["./rows", "/rows", "rows.jsonl", "a/b/c", ""])
def test_missing_paths_are_not_looked_for_on_the_hub(name: str) -> None:
    """Bug: half a minute of retries for a path with a typing error."""
    with pytest.raises(UserError, match=r"hub data set .*(does not exist|is empty)"):
        row_files.load_hub_dataset(name, None, "train")


def test_too_long_is_refused_or_counted(target: Target, tmp_path: Path) -> None:
    """Bug: a prompt that does not fit is dropped without a word."""
    path = str(write(tmp_path, [{"id": "long", "prompt": "x" * 600}, {"prompt": "zq"}]))
    with pytest.raises(UserError, match="too_long"):
        load_task_prompts(Task("own", path), target)
    task = Task("own", path, too_long="fail")
    items, failed = load_eval_prompts([task], target, 4, Journal(tmp_path / "journal.jsonl", {}))
    assert [text_of(item, target) for item in items] == ["zq"]
    assert [(f.id, "600 tokens" in f.error) for f in failed] == [("long", True)]


def test_versions_tell_recipe_and_file(target: Target, tmp_path: Path) -> None:
    """Bug: two runs on different files, or with different prompts, carry one version."""
    path = write(tmp_path, [ROWS["gsm8k"]])
    before = task_version(Task("gsm8k", str(path)))
    assert before.startswith("gsm8k@1+")
    path.write_text(path.read_text() + "\n")
    assert task_version(Task("gsm8k", str(path))) != before
    assert (
        task_version(Task("code"))
        == "code@" + (dataset_specs.BUNDLED_PROMPTS / "VERSION").read_text().strip()
    )


def test_the_canonical_solution_passes(target: Target, tmp_path: Path) -> None:
    """Bug: prompt, answer and tests are put together so that a right answer fails, or a wrong one passes."""
    item = load_task_prompts(Task("humaneval", str(write(tmp_path, [HUMANEVAL]))), target)[0]
    for answer, passed in (
        ("    return n + n\n\ndef ", True),
        ("    return n\n", False),
        ("```python\ndef double(n):\n    return 2 * n\n```\nDone.", True),
        ("Here:\n```python\ndef double(n):\n    return 3 * n\n```", False),
    ):
        code = answer_quality.build_test_program(answer, item.prefix, item.reference, item.stop)
        assert sandbox.run(code).passed == passed, code


@pytest.mark.parametrize("rows", [1, 4])
def test_both_arms_stop_at_the_same_token(rows: int, target: Target) -> None:
    """Bug: a stop string inside a round's accepted tokens is passed over, or ends the rows beside it."""
    endless = replace(target, eos=frozenset())
    prompts = [target.tokenizer(text)["input_ids"] for text in ("zq", "abc", "Hello", "x y")]
    texts = [
        target.tokenizer.decode(o.output_ids)
        for o in decode(endless, None, prompts, max_new_tokens=40)
    ]
    stop = sorted(set(texts[0][5:]) - set(texts[0][:5]))[:1]  # occurs late in the first answer
    assert stop
    found = []
    for draft in (None, NgramDraft()):
        items = [TaskPrompt("t", str(i), p, stop=tuple(stop)) for i, p in enumerate(prompts)]
        records = SpeculativeEngine(endless, draft).speculate(prompts, rows=rows, max_new_tokens=40)
        outputs = collect_until_stop(items, records, target.tokenizer)
        found.append([(o.output_ids, o.finish_reason) for o in outputs])
    assert found[0] == found[1]
    for text, (ids, reason) in zip(texts, found[0], strict=True):
        kept = target.tokenizer.decode(ids)
        assert text.startswith(kept.rstrip("\ufffd"))
        assert (reason == "stop") == (stop[0] in text) == kept.endswith(stop[0])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"prompt": "Hi there", "note": 1}], ["read as prompt (columns prompt); not used: note"]),
        ([{"question": "Hi?"}, {"question": "So?"}], ["read as question (columns question)"]),
        ([{"messages": [{"role": "user", "content": "Hi"}], "prompt": "no"}],
         ["read as messages (columns messages); not used: prompt"]),
        ([{"prompt": "Hi"}, {"text": "So"}],
         ["read as prompt (columns prompt)", "read as text (columns text)"]),
        ([{"instruction": "Add", "input": "1 2"}], ["read as instruction (columns instruction, input)"]),
        ([{"turns": ["Hi", "So"]}], []),
    ],
)  # fmt: skip
def test_evaluation_says_how_own_rows_were_read(
    tmp_path: Path, rows: list[dict[str, Any]], said: list[str]
) -> None:
    """Bug: sampling said it, and evaluation took columns without a word."""
    template = "{% for m in messages %}<2>{{ m.content }}<1>{% endfor %}"
    target = save_byte_target(tmp_path / "target", template, 256)
    path = write(tmp_path, rows)
    done = worlds.call(
        "eval/run.py", "--target", target, "--methods", "[{name: ngram}]", "--max_new_tokens", 2,
        "--tasks", json.dumps([{"name": "mine", "path": str(path)}]), "--out", tmp_path / "out",
        "--temperatures", "[0.0]",
    ).ok()  # fmt: skip
    lines = [line for line in done.err.splitlines() if "read as" in line]
    assert lines == [f"mine: {line}" for line in said]
