"""Agents' rollouts, as the projects that write them store them: token ids and labels to the letter, each label once.

The ids are of the bundled target's tokenizer, cut where no tokenizer would cut them: whatever tokenises a text again is
seen by it.
"""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from decode.common.errors import UserError
from tests import worlds
from tests.rows import sample, write_rows
from tests.tiny import VOCAB, tiny_target
from tests.train.doctor_checks.sets import examine
from tests.train.families.test_heads_training import assert_same, learned, model_of, trainee_of
from tests.train.test_distill_command import losses_of
from tests.worlds import ROOT, World
from train.data import batching, filters, sample_store
from train.data.batching import label_mask
from train.data.conversations import Conversation, cut_at_labels, join_turns
from train.data.filters import PREFIXES, REPEATED, learn_once
from train.data.manifest import read_manifest
from train.data.sample_store import SampleRow
from train.data.sources import REFUSED, ReadLog, stream_prompts
from train.settings.data import PromptSource

TARGET = ROOT / "assets" / "target"
TEMPLATE = (
    "{% if tools %}#tools {{ tools | map(attribute='function') | map(attribute='name') | join(' ') }}\n{% endif %}"
    "{% for m in messages %}#{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments }}]{% endfor %}"
    "<|endoftext|>\n{% endfor %}{% if add_generation_prompt %}#assistant\n{% endif %}"
)
EOS = 0
Piece = tuple[int, str]
"""(1 for what the assistant wrote, text that is encoded by itself)."""
OPENING: list[Piece] = [(0, "#user\nzq Os"), (0, "lo?"), (0, "#assistant\n")]
CALL: list[Piece] = [(1, "[wea"), (1, "ther Oslo]"), (1, "<|endoftext|>")]
RESULT: list[Piece] = [(0, "\n#tool\n1"), (0, "2 deg"), (0, "rees<|endoftext|>\n#assistant\n")]
ANSWER: list[Piece] = [(1, "12 C, zq"), (1, "."), (1, "<|endoftext|>")]
OTHER: list[Piece] = [(0, "#user\nzq moon?<|endoftext|>\n#assistant\n"), (1, "Full<|endoftext|>")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """The bundled target's tokenizer and config with a chat template."""
    folder = tmp_path_factory.mktemp("chatty") / "target"
    shutil.copytree(TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def encoded(tokenizer: Any, *parts: list[Piece]) -> tuple[list[int], list[int]]:
    """(the ids of the pieces, their labels)."""
    ids: list[int] = []
    mask: list[int] = []
    for label, text in (piece for part in parts for piece in part):
        found = tokenizer(text)["input_ids"]
        ids, mask = ids + found, mask + [label] * len(found)
    return ids, mask


def stored(target: Path, path: Path, out: Path, *more: object) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of the rows that the command makes of a file, in falling order."""
    sample(target, path, out, "--origin", "text", "--turns", "all", *more).ok()
    rows = sample_store.read_shards(out)
    found = [(list(row["input_ids"]), label_mask(row).astype(int).tolist()) for row in rows]
    return sorted(found, reverse=True)


# ---- token ids ----


def verifiers_step(prompt: tuple[list[int], list[int]], reply: tuple[list[int], list[int]]) -> Any:
    return {
        "prompt_ids": prompt[0], "prompt_mask": prompt[1], "completion_ids": reply[0],
        "completion_mask": reply[1], "completion_logprobs": [-0.5] * len(reply[0]),
    }  # fmt: skip


def forms(tokenizer: Any) -> dict[str, list[dict[str, Any]]]:
    """Two episodes, of two turns and of one, as each project writes them."""
    whole, other = encoded(tokenizer, OPENING, CALL, RESULT, ANSWER), encoded(tokenizer, OTHER)
    asked, rest = encoded(tokenizer, OPENING), encoded(tokenizer, CALL, RESULT, ANSWER)
    moon, full = encoded(tokenizer, OTHER[:1]), encoded(tokenizer, OTHER[1:])
    called = encoded(tokenizer, CALL)
    until = encoded(tokenizer, OPENING, [(0, text) for _, text in CALL], RESULT)
    answer = encoded(tokenizer, ANSWER)
    nodes = [
        {"message": {"role": "user", "content": "zq Oslo?"}, "parts": OPENING[:2]},
        {"parent": 0, "sampled": True, "message": {"role": "assistant"}, "parts": OPENING[2:] + CALL},
        {"parent": 1, "message": {"role": "tool", "content": "12"}, "parts": RESULT[:2]},
        {"parent": 2, "sampled": True, "message": {"role": "assistant", "content": "12 C, zq."},
         "parts": RESULT[2:] + ANSWER},
        {"message": {"role": "user", "content": "zq moon?"}, "parts": OTHER[:1]},
        {"parent": 4, "sampled": True, "message": {"role": "assistant", "content": "Full"},
         "parts": OTHER[1:]},
    ]  # fmt: skip
    for node in nodes:
        node["token_ids"], mask = encoded(tokenizer, node.pop("parts"))  # type: ignore[arg-type]
        node["mask"] = [bool(one) for one in mask]
    tail = encoded(tokenizer, [(0, "\n#user\nunanswered")])
    return {
        "SkyRL pretokenised": [
            {"input_ids": whole[0] + tail[0], "loss_mask": whole[1] + tail[1]},
            {"input_ids": other[0], "loss_mask": other[1]},
        ],
        "SkyRL rollouts": [
            {"prompt_token_ids": asked[0], "response_ids": rest[0], "loss_masks": rest[1], "rewards": 1.0},
            {"prompt_token_ids": moon[0], "response_ids": full[0], "loss_masks": full[1], "rewards": 0.0},
        ],
        "SkyRL GeneratorOutput": [
            {"prompt_token_ids": [asked[0], moon[0]], "response_ids": [rest[0], full[0]],
             "rewards": [1.0, 0.0], "loss_masks": [rest[1], full[1]], "stop_reasons": ["stop", "stop"],
             "rollout_logprobs": None},
        ],
        "verifiers processed": [verifiers_step(asked, rest), verifiers_step(moon, full)],
        "verifiers ProcessedOutputs": [
            {name: [one, two] for (name, one), two in zip(
                verifiers_step(asked, rest).items(), verifiers_step(moon, full).values(), strict=True
            )} | {"rewards": [1.0, 0.0]},
        ],
        "verifiers trajectories": [  # a step for each turn, whose prompt is all before
            {"example_id": 0, "reward": 1.0, "prompt": [{"role": "user", "content": "zq Oslo?"}],
             "completion": [{"role": "assistant", "content": "not read"}],
             "trajectory": [
                 {"tokens": verifiers_step(asked, called)}, {"tokens": None},
                 {"tokens": verifiers_step((until[0], [0] * len(until[0])), answer)},
             ]},
            {"example_id": 1, "prompt": "zq moon?", "completion": "not read",
             "trajectory": [{"tokens": verifiers_step(moon, full)}]},
        ],
        "verifiers traces": [{"id": "e", "ok": True, "task": {}, "traces": [{"nodes": nodes}]}],
    }  # fmt: skip


FORMS = list(forms(AutoTokenizer.from_pretrained(TARGET)))


@pytest.mark.parametrize("form", FORMS)
def test_ids_and_labels_are_those_of_the_rollout(form: str, tokenizer: Any, tmp_path: Path) -> None:
    """Bug: ids are tokenised again, the mask is moved by one, tools' answers are learned, a turn is lost or learned
    twice, or the unlabelled end is kept."""
    wanted = [encoded(tokenizer, OPENING, CALL, RESULT, ANSWER), encoded(tokenizer, OTHER)]
    assert tokenizer(tokenizer.decode(wanted[0][0]))["input_ids"] != wanted[0][0]
    path = write_rows(tmp_path / "rows.jsonl", forms(tokenizer)[form])
    found = stored(TARGET, path, tmp_path / "out")
    assert found == sorted(wanted, reverse=True)
    trained = [list(zip(*one, strict=True)) for one in found]
    said = ["".join(tokenizer.decode([i]) for i, label in row if label) for row in trained]
    assert sorted(said) == [
        "Full<|endoftext|>", "[weather Oslo]<|endoftext|>12 C, zq.<|endoftext|>",
    ]  # fmt: skip


def test_parquet_and_json_are_read_as_lines_are(tokenizer: Any, tmp_path: Path) -> None:
    """Bug: ids of Arrow are no list, or an object of lists in a .json file is taken for rows."""
    made = forms(tokenizer)
    table = pyarrow.Table.from_pylist(made["SkyRL rollouts"])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    batch = made["SkyRL GeneratorOutput"][0]
    (tmp_path / "rows.json").write_text(json.dumps(batch, indent=1))
    found = [
        stored(TARGET, tmp_path / name, tmp_path / name.replace(".", "_"))
        for name in ("rows.parquet", "rows.json")
    ]
    assert found[0] == found[1] != []


# ---- messages ----

USER, TOOL = {"role": "user", "content": "zq Oslo?"}, {"role": "tool", "content": "12 degrees"}
FUNCTION = {"name": "weather", "arguments": '{"city": "Oslo"}'}
CALLS = [{"id": "1", "type": "function", "function": FUNCTION}]
CALLING = {"role": "assistant", "content": None, "tool_calls": CALLS}
SAYS = {"role": "assistant", "content": "12 C, zq."}
OFFERED = {"name": "weather", "description": "", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": OFFERED}]
CHAT: list[Piece] = [
    (0, "#tools weather\n#user\nzq Oslo?<|endoftext|>\n#assistant\n"),
    (1, '[weather {"city": "Oslo"}]<|endoftext|>'),
    (0, "\n#tool\n12 degrees<|endoftext|>\n#assistant\n"),
    (1, "12 C, zq.<|endoftext|>"),
]


def answer(message: dict[str, Any]) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}  # fmt: skip


TURNS = [([USER], CALLING), ([USER, CALLING, TOOL], SAYS)]
"""(what a request asked, what it was answered), of one episode."""
LOGS: dict[str, list[dict[str, Any]]] = {
    "requests": [
        {"request": {"model": "m", "messages": asked, "tools": TOOLS}, "response": answer(said)}
        for asked, said in TURNS
    ],
    "JSON in texts": [
        {"request_body": json.dumps({"messages": asked, "tools": TOOLS}), "response_body": json.dumps(answer(said))}
        for asked, said in TURNS
    ],
    "LiteLLM": [
        {"id": "1", "messages": asked, "model_parameters": {"tools": TOOLS}, "response": answer(said)}
        for asked, said in TURNS
    ],
    "a batch": [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions",
         "body": {"messages": asked, "tools": TOOLS}, "error": None,
         "response": {"status_code": 200, "body": answer(said)}}
        for i, (asked, said) in enumerate(TURNS)
    ],
    "verifiers results": [
        {"example_id": 0, "reward": 1.0, "tool_defs": [OFFERED], "prompt": [USER], "completion": [
            {"role": "assistant", "content": "", "tool_calls": [json.dumps({"id": "1", **FUNCTION})]},
            TOOL | {"tool_call_id": "1"}, SAYS,
        ]},
    ],
    "verifiers traces without ids": [
        {"traces": [{"tools": [OFFERED], "nodes": [
            {"message": USER},
            {"parent": 0, "message": {"role": "assistant", "tool_calls": [{"id": "1", **FUNCTION}]}},
            {"parent": 1, "message": TOOL}, {"parent": 2, "message": SAYS},
        ]}]},
    ],
}  # fmt: skip


@pytest.mark.parametrize("log", LOGS)
def test_of_messages_the_assistants_own_are_learned_once(
    log: str, chatty: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """Bug: the tool's answer is learned, calls or tools are lost, or the first turn is learned again with the second
    one."""
    wanted = encoded(tokenizer, CHAT)
    whole = "".join(text for _, text in CHAT)
    assert wanted[0] == tokenizer(whole)["input_ids"]  # the turns' seams are seams of tokens
    path = write_rows(tmp_path / "rows.jsonl", LOGS[log])
    for turns in ("all", "last"):
        found = stored(chatty, path, tmp_path / turns, "--turns", turns)
        assert len(LOGS[log]) == 1 or found == [wanted]
        if len(LOGS[log]) == 1:
            first = CHAT[:1] + [(int(turns == "all"), CHAT[1][1])] + CHAT[2:]
            assert found == [encoded(tokenizer, first)]
    counts = read_manifest(tmp_path / "all").counts
    assert counts.get(PREFIXES, 0) == len(LOGS[log]) - 1
    assert counts.get(REPEATED, 0) == (len(LOGS[log]) - 1) * sum(encoded(tokenizer, CHAT[1:2])[1])


def test_requests_are_prompts_to_sample(tmp_path: Path) -> None:
    """Bug: a batch's input or a log is no prompt, or its answer is asked too."""
    lines = [
        *LOGS["a batch"],
        {"custom_id": "2", "body": {"messages": [USER | {"content": "zq?"}]}},
    ]
    path = write_rows(tmp_path / "rows.jsonl", lines)
    prompts = stream_prompts([PromptSource("file", str(path))], 0, ReadLog())
    asked = [(prompt.messages, prompt.tools) for prompt in prompts]
    assert [len(messages or []) for messages, _ in asked] == [1, 3, 1]
    assert asked[0] == ([USER], TOOLS)
    assert (asked[1][0] or [])[1]["tool_calls"] == CALLS
    assert asked[2][1] is None


def test_answers_of_one_request_are_rows_of_their_own(
    chatty: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """Bug: of n choices one is learned, or what they begin with alike is learned n times."""
    said = ["Snow, zq.", "Snow and rain."]
    choices = [choice for text in said for choice in answer(SAYS | {"content": text})["choices"]]
    log = {"request": {"messages": [USER]}, "response": {"choices": choices}}
    path = write_rows(tmp_path / "rows.jsonl", [log])
    found = stored(chatty, path, tmp_path / "out")
    assert len(found) == 2
    snow = tokenizer("Snow")["input_ids"]
    labels = [[i for i, label in zip(*row, strict=True) if label] for row in found]
    assert sum(ids[: len(snow)] == snow for ids in labels) == 1
    shared = [
        row["shared_prefix"]
        for row in sample_store.read_shards(tmp_path / "out")
        if "shared_prefix" in row
    ]
    assert len(shared) == 1


# ---- each label once ----

Marked = tuple[Sequence[int], Sequence[bool]]
"""Token ids, and which of them are labels."""


def marked(conversation: Conversation) -> Marked:
    ids, spans = join_turns(conversation.prompt_segments, conversation.replies)
    row: Any = {"input_ids": ids, "loss_spans": spans}
    return ids, label_mask(row).tolist()


def labels_in(rows: Sequence[Marked]) -> Counter[tuple[int, ...]]:
    """{a label with all tokens before it: rows in which it is one}."""
    return Counter(
        tuple(ids[: i + 1]) for ids, mask in rows for i, label in enumerate(mask) if label
    )


def random_rollouts(seed: int) -> list[Conversation]:
    """Rows that branch from each other, go on with each other, or say the same, with masks that may differ."""
    rng = random.Random(seed)
    rows: list[tuple[list[int], list[bool]]] = []
    for _ in range(rng.randint(1, 12)):
        ids, mask = (
            rng.choice(rows) if rows and rng.random() < 0.7 else ([rng.randrange(3)], [False])
        )
        keep = rng.randint(1, len(ids))
        more = rng.randint(0, 6)
        ids = ids[:keep] + [rng.randrange(3) for _ in range(more)]
        mask = mask[:keep] + [rng.random() < 0.6 for _ in range(more)]
        if rng.random() < 0.2:
            mask = [False] + [rng.random() < 0.5 for _ in mask[1:]]
        if any(mask):
            rows.append((ids, mask))
    return [cut_at_labels(ids, mask) for ids, mask in rows]


def check_once(learn: Callable[..., Any], seed: int) -> None:
    rows = random_rollouts(seed)
    left, counts, unread = learn(rows)
    kept = [marked(one[0]) for one in left if one is not None]
    before, after = labels_in(list(map(marked, rows))), labels_in(kept)
    assert after.keys() == before.keys()
    assert set(after.values()) <= {1}
    assert all(any(mask) for _, mask in kept)
    texts = [tuple(ids) for ids, _ in kept]
    assert not any(
        a == b[: len(a)] for i, a in enumerate(texts) for j, b in enumerate(texts) if i != j
    )
    read = [
        sum(len(marked(row)[0]) for row in some) for some in (rows, [one[0] for one in left if one])
    ]
    assert unread == read[0] - read[1]
    assert counts.get(PREFIXES, 0) == len(rows) - len(kept)
    assert counts.get(REPEATED, 0) == before.total() - after.total()


def check_all(learn: Callable[..., Any]) -> None:
    for seed in range(300):
        check_once(learn, seed)


def test_every_label_is_learned_exactly_once() -> None:
    """Bug: a label of a shared prefix is learned twice, or in none of the rows that have it."""
    check_all(learn_once)


PLANTED = {
    "what rows have in common is not noticed": (
        "shared = int(np.append(before[:length] != ids[:length], True).argmax())", "shared = 0",
    ),
    "labels go with the beginning": ("own[last][0][:shared] |= new", "pass"),
    "only the row before counts": ("taken = np.concatenate([taken[:shared],", "taken = np.concatenate([new[:shared],"),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_labels_that_are_lost_or_doubled_are_seen(bug: str) -> None:
    """Guards the test above."""
    source, space = Path(filters.__file__).read_text(), dict[str, Any]()
    assert source.count(PLANTED[bug][0]) == 1
    exec(source.replace(*PLANTED[bug]), space)
    with pytest.raises(AssertionError):
        check_all(space["learn_once"])


def test_rollouts_that_do_not_fit_take_no_labels_with_them(tokenizer: Any, tmp_path: Path) -> None:
    """Bug: a row goes for being the beginning of one that is then too long for the target's context."""
    short = encoded(tokenizer, OPENING, CALL)
    long = [*short[0], *[5, 6] * 300], [*short[1], *[1] * 600]
    path = write_rows(
        tmp_path / "rows.jsonl", [{"input_ids": i, "loss_mask": m} for i, m in (short, long)]
    )
    assert stored(TARGET, path, tmp_path / "out") == [short]
    assert PREFIXES not in read_manifest(tmp_path / "out").counts


# ---- training ----


def rollout_rows(count: int, seed: int = 0) -> list[SampleRow]:
    """Rows of several turns that branch, as they are stored."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, VOCAB, 9).tolist()
    rows = []
    for _ in range(count):
        ids = trunk[: rng.integers(4, 9)] + rng.integers(0, VOCAB, rng.integers(6, 20)).tolist()
        rows.append(cut_at_labels(ids, [False, False, *(rng.random(len(ids) - 2) < 0.5).tolist()]))
    left = [one for one in learn_once(rows)[0] if one is not None]
    made: list[SampleRow] = []
    for i, (one, shared) in enumerate(left):
        ids, spans = join_turns(one.prompt_segments, one.replies)
        made.append({"id": str(i), "source": "x", "origin": "text", "input_ids": ids, "loss_spans": spans,
                     "finish_reason": "text", "shared_prefix": shared})  # fmt: skip
    return made


@pytest.mark.parametrize("family", ["medusa", "eagle1", "eagle3"])
def test_packed_rollouts_teach_the_same(family: str) -> None:
    """Bug: masks in the midst of a row, of which packing has one a row."""
    trainee, rows = trainee_of(family, tiny_target(model_of())), rollout_rows(8)
    assert max(len(row["loss_spans"]) for row in rows) > 3
    whole = learned(trainee, batching.collate(rows, 0))
    assert batching.supervised_token_count(rows) > 20
    assert_same(learned(trainee, batching.pack(rows, 0)), whole)


def test_a_draft_learns_rollouts_by_the_commands(world: World, tmp_path: Path) -> None:
    """Bug: what is stored of rollouts cannot be trained on, or packed it is another loss."""
    rng = random.Random(0)
    rows = []
    for _ in range(12):
        ids = [rng.randrange(12, 200) for _ in range(40)]
        mask = [int(8 <= i % 20 < 18) for i in range(40)]
        rows += [{"input_ids": ids[:n], "loss_mask": mask[:n]} for n in (20, 40)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    done = sample(world.target, path, tmp_path / "set", "--origin", "text").ok()
    assert "12 that others begin with are left out" in done.err
    losses = []
    for pack in ("false", "true"):
        out = tmp_path / pack
        worlds.call(
            "train/distill.py", "--target", world.target, "--data", tmp_path / "set", "--out", out, "--draft.init",
            world.draft, "--loop.steps", 3, "--loop.batch_size", 4, "--loop.log_every", 1, "--loop.eval_every", 0,
            "--loop.pack", pack,
        ).ok()  # fmt: skip
        losses.append(losses_of(out))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# ---- what is refused, and what the doctor says ----

GOOD = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another length": (GOOD | {"loss_mask": [0, 1]}, "`loss_mask` has 2 entries, and `input_ids` 4 tokens"),
    "no label": (GOOD | {"loss_mask": [1, 0, 0, 0]}, "`loss_mask` marks no token behind the row's first"),
    "no bits": (GOOD | {"loss_mask": [0, 0, 2, 1]}, "`loss_mask` must be a list of 1 (to learn) and 0"),
    "no mask": ({"input_ids": [5, 6]}, "and 0, one for each token, not None"),
    "texts": (GOOD | {"input_ids": ["a", "b", "c", "d"]}, "`input_ids` must be a list of token ids, not ['a'"),
    "another tokenizer": (GOOD | {"input_ids": [5, 6, 7, 9999]}, "token id 9999 lies outside the target's vocabulary"),
    "an answer alone": ({"custom_id": "1", "response": {"body": answer(SAYS)}}, "an answer without its request"),
    "a circle": ({"nodes": [{"parent": 1, "message": {}}, {"parent": 0, "message": {}}, {"parent": 1, "message": {}}]},
                 "seems to hold rollouts"),
    "a torn batch": ({"prompt_token_ids": [[1], [2]], "response_ids": [[3]], "loss_masks": [[1]]},
                     "seems to hold rollouts"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_a_fault_costs_its_row_and_is_named(fault: str, tmp_path: Path) -> None:
    """Bug: a mask that does not fit is cut or filled up in silence, or one row ends the run."""
    row, says = BAD[fault]
    path = write_rows(tmp_path / "rows.jsonl", [GOOD, row])
    done = sample(TARGET, path, tmp_path / "out", "--origin", "text", "--max_bad_rows", 0.5).ok()
    [line] = [line for line in done.err.splitlines() if line.startswith("skipped ")]
    assert f"{path}:2" in line
    assert says in line
    assert read_manifest(tmp_path / "out").counts[REFUSED] == 1
    refused = sample(TARGET, path, tmp_path / "no", "--origin", "text", "--max_bad_rows", 0)
    assert says in refused.error()
    assert not (tmp_path / "no").exists()


def test_ids_alone_are_no_prompts(tmp_path: Path) -> None:
    """Bug: sampling asks an empty prompt, or says that columns of texts are missing."""
    path = write_rows(tmp_path / "rows.jsonl", [GOOD])
    with pytest.raises(
        UserError, match=r"rows.jsonl:1: holds token ids and no messages: --origin text"
    ):
        list(stream_prompts([PromptSource("file", str(path))], 0, ReadLog()))


def test_the_doctor_knows_where_another_row_has_the_labels(
    chatty: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """Bug: rows that go on in the midst of a reply, whose beginning another row teaches, are called wrong; or masks
    that are wrong no more."""
    rows = []
    for i in range(8):
        asked: list[Piece] = [(0, f"#user\nzq{i // 4}?<|endoftext|>\n#assistant\n")]
        said: list[Piece] = [(1, "zq qz"), (1, f" {i}qq zzq<|endoftext|>")]
        again: list[Piece] = [
            (0, f"\n#user\nzz{i}<|endoftext|>\n#assistant\n"),
            (1, f"qz{i}<|endoftext|>"),
        ]
        rows.append(encoded(tokenizer, asked, said, again))
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"input_ids": ids, "loss_mask": mask} for ids, mask in rows])
    stored(chatty, path, tmp_path / "set")
    begun = [
        row["loss_spans"][0][0] == row.get("shared_prefix")
        for row in sample_store.read_shards(tmp_path / "set")
    ]
    assert sum(begun) == 6
    names = examine(chatty, tmp_path / "set")["found"].keys()
    wrong = "mask begins at the wrong token"
    assert not names & {wrong, "reply without generation prompt", "prompt is rendered otherwise"}
    moved = [{"input_ids": ids, "loss_mask": [0, *mask[:-1]]} for ids, mask in rows]
    stored(chatty, write_rows(path, moved), tmp_path / "moved")
    found = examine(chatty, tmp_path / "moved")["found"]
    assert {wrong, "EOS is not supervised"} <= found.keys()


# ---- the page ----


def test_the_examples_of_the_page_are_read(tmp_path: Path) -> None:
    """Bug: the page shows a form that is not read."""
    page = (ROOT / "docs" / "data_forms.md").read_text(encoding="utf-8")
    section = page.partition("## Agents' rollouts")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("{")]
    assert len(lines) == 6
    for line in lines:
        path = write_rows(tmp_path / "rows.jsonl", [line])
        [prompt] = stream_prompts([PromptSource("file", str(path))], 0, ReadLog(), True)
        assert prompt.tokens is not None or prompt.messages is not None
