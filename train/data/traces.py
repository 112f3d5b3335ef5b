"""Agents' rollouts: rows of token ids with a mask, traces that hold several, logs of requests.

Token ids are taken as they are: what the model read and wrote is not tokenised again. Forms are found by columns, as in
eval/tasks/row_forms.py, which reads the messages of logs and of traces without ids.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from decode.common.errors import UserError
from eval.tasks.row_forms import ARGUMENTS, PROMPT_COLUMNS, TOOLS, DatasetRow
from train.data.conversations import Conversation, cut_at_labels

TOKEN_FORMS = (
    (("input_ids", "loss_mask"),),
    (("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask")),
    (("prompt_token_ids", "prompt_mask"), ("response_ids", "loss_masks")),
)
"""(columns of token ids, of their mask) of SkyRL's pretokenised sets, verifiers and SkyRL's rollouts. The mask of a
prompt may be absent: it has no labels then."""
REQUESTS, ANSWERS = ("request", "request_body", "body"), ("response", "response_body")
"""Columns of a log: what was asked, what was answered (in a batch's output the `body` of that)."""


def unfold(item: DatasetRow, answered: bool) -> list[DatasetRow]:
    """The rollouts in a row, each as a row of token ids or of messages; any other row as it is.

    Without `answered` (prompts to sample) no ids are looked for. A row that only seems to hold rollouts has an error.
    """
    try:
        found = list(_rollouts(item.fields, answered))
    except (AttributeError, KeyError, TypeError, UserError, ValueError) as error:
        odd = f"seems to hold rollouts ({error!r}): correct it or remove the row"
        why = f"{item.location}: {error if isinstance(error, UserError) else odd}"
        return [DatasetRow({}, item.location, why)]
    places = [item.location] * len(found)
    if len(found) > 1:
        places = [f"{item.location}, rollout {i}" for i in range(1, len(found) + 1)]
    return [DatasetRow(*one) for one in zip(found, places, strict=True)] or [item]


def _rollouts(fields: dict[str, Any], answered: bool) -> Iterator[dict[str, Any]]:
    graphs = fields.get("traces", [fields]) if PROMPT_COLUMNS.isdisjoint(fields) else None
    steps = fields.get("trajectory") if answered else None
    columns = (name for part in _form(fields) for name in part)
    batch = [name for name in columns if _is_list_of(fields.get(name), list)]
    if _is_list_of(graphs, dict) and any("nodes" in one for one in graphs):
        for trace in graphs:
            yield from _branches(trace)
    elif _is_list_of(steps, dict) and any(one.get("tokens") for one in steps):
        yield from (one["tokens"] for one in steps if one.get("tokens"))
    elif answered and batch:
        for row in zip(*(fields[name] for name in batch), strict=True):
            yield dict(zip(batch, row, strict=True))
    elif _is_list_of(fields.get("tool_defs"), dict):
        others = {name: value for name, value in fields.items() if name != "tool_defs"}
        yield others | {TOOLS: _functions(fields["tool_defs"])}
    else:
        yield from _logged_chats(fields)


def _is_list_of(value: Any, kind: type) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and bool(value) and all(isinstance(one, kind) for one in value)


def _form(fields: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """The first of TOKEN_FORMS that the row has, prompts' masks excepted; without messages its ids are enough."""
    for form in TOKEN_FORMS:
        needed = {column for column, _ in form}
        if not PROMPT_COLUMNS.isdisjoint(fields):
            needed.add(form[-1][1])
        if fields.keys() >= needed:
            return form
    return ()


def _branches(trace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each path from a root to a leaf of verifiers' graph of messages, whose nodes hold the tokens that they add."""
    nodes = trace["nodes"]
    for leaf in sorted({*range(len(nodes))} - {node.get("parent") for node in nodes}):
        path, at = [nodes[leaf]], leaf
        while (parent := nodes[at].get("parent")) is not None:
            if not 0 <= parent < at:
                raise ValueError(f"node {at} has the parent {parent}")
            at = parent
            path.insert(0, nodes[at])
        found = {"messages": [node["message"] for node in path]}
        found |= {TOOLS: _functions(trace[TOOLS])} if trace.get(TOOLS) else {}
        for column, field in (("input_ids", "token_ids"), ("loss_mask", "mask")):
            if values := [value for node in path for value in node.get(field, [])]:
                found[column] = values
        yield found


def _functions(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of verifiers as a request offers them."""
    return [{"type": "function", "function": tool} for tool in tools]


def _logged_chats(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chat of a logged request with each of its answers; nothing for a row that is no log."""
    answer = _first_object(fields, ANSWERS)
    answer = _first_object(answer, ("body",)) or answer
    found = answer.get("choices")
    choices = found if _is_list_of(found, dict) and "message" in found[0] else []
    asked = _first_object(fields, REQUESTS)
    if "messages" not in asked and choices:
        asked = fields
    if "messages" not in asked:
        if choices and PROMPT_COLUMNS.isdisjoint(fields):
            raise UserError(
                "an answer without its request: join both files of a batch by custom_id"
            )
        return
    tools = asked.get(TOOLS) or (fields.get("model_parameters") or {}).get(TOOLS)
    given = {TOOLS: tools, ARGUMENTS: asked.get(ARGUMENTS)}
    for reply in [[choice["message"]] for choice in choices] or [[]]:
        chat = {"messages": [*asked["messages"], *reply]}
        yield chat | {name: value for name, value in given.items() if value}


def _first_object(fields: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The first of the columns that holds an object, or the JSON of one; {} if none does."""
    for value in map(fields.get, names):
        if isinstance(value, str) and value.startswith("{"):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
        if isinstance(value, dict):
            return value
    return {}


def read_tokens(item: DatasetRow, answered: bool) -> Conversation | None:
    """The row's token ids, cut where its labels begin and end and behind the last one; None for a row without them.

    A row's first token is no label: nothing predicts it. UserError that names the row for what is no list of token ids
    with as many 0 and 1, for one without labels, and without `answered` for one that has no messages beside them.
    """
    form = _form(item.fields)
    if not form or not (answered or PROMPT_COLUMNS.isdisjoint(item.fields)):
        return None
    if not answered:
        what = "holds token ids and no messages: --origin text learns them"
        raise UserError(f"{item.location}: {what}")
    row_ids: list[int] = []
    row_mask: list[int] = []
    for column, marks in form:
        ids: Any = item.fields[column]
        mask: Any = item.fields.get(marks)
        if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
            raise UserError(f"{item.name(column)} must be a list of token ids, not {ids!r:.40}")
        if mask is None and marks == "prompt_mask":
            mask = [0] * len(ids)
        if not isinstance(mask, list) or not all(one in (0, 1) for one in mask):
            what = "must be a list of 1 (to learn) and 0, one for each token"
            raise UserError(f"{item.name(marks)} {what}, not {mask!r:.40}")
        if len(mask) != len(ids):
            what = f"has {len(mask)} entries, and `{column}` {len(ids)} tokens: give each one"
            raise UserError(f"{item.name(marks)} {what}")
        row_ids, row_mask = row_ids + ids, row_mask + mask
    if not any(row_mask[1:]):
        what = "marks no token behind the row's first: mend it or remove the row"
        raise UserError(f"{item.name(form[-1][1])} {what}")
    return cut_at_labels(row_ids, [False, *map(bool, row_mask[1:])])
