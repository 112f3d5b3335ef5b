"""What a row of a data set means, decided from its columns by one table, for training and evaluation alike.

A row is a chat, a prompt with or without its answer, or a whole text, and may offer tools.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from decode.common.chat.choice import Arguments, Messages, Tools, check_arguments
from decode.common.errors import UserError
from decode.common.files import parse_json

Content = str | tuple[str, str] | Messages
"""A text, a (prompt, answer) pair, or the messages of a chat. The content of a message is a text, or where images are
read a list of texts ({type: text, text: …}) and images ({type: image, image: …})."""


@dataclass(frozen=True)
class RowForm:
    """One way in which data sets write a prompt."""

    column: str  # where the prompt stands: a text, a list of messages, or such a list as JSON
    answers: tuple[str, ...] = ()
    """Columns that may hold its answer; the first one that is not empty does. `answers` holds calls of tools."""
    chat: bool = False  # the column holds messages, never a text
    whole: bool = False  # A text without an answer is no question: all of it can be learned
    input: str = ""  # column of a text that follows the prompt behind a blank line


FORMS = (
    RowForm("messages", chat=True),
    RowForm("conversations", chat=True),
    RowForm("conversation", chat=True),
    RowForm("prompt", answers=("completion", "response", "output")),
    RowForm("instruction", answers=("output", "response", "completion"), input="input"),
    RowForm("question", answers=("answer", "response", "output")),
    RowForm("query", answers=("response", "output", "answers")),
    RowForm("text", answers=("response",), whole=True),
)
"""Of the columns that a row has and that are not empty, the first one here is its prompt."""
PROMPT_COLUMNS = frozenset(form.column for form in FORMS)
TOOLS, ARGUMENTS = "tools", "chat_template_kwargs"
CALLS = ("function_call", "tool_call")
"""Speakers of ShareGPT whose text is the JSON of one call, or of several."""
SPEAKERS = {
    "user": ("human", "user", "prompter"),
    "assistant": ("gpt", "chatgpt", "bing", "bard", "assistant", "model", "bot", "ai", *CALLS),
    "system": ("system", "system_prompt"),
    "tool": ("tool", "observation", "function_response", "tool_response", "tool_result"),
}
ROLES = {name: role for role, names in SPEAKERS.items() for name in names}
"""{how data sets name who speaks, in small letters: the role}."""
LISTED = 12  # how many of a row's columns an error names
TEXT_PARTS = ("text", "input_text", "output_text")  # types of the parts of a content that are texts
IMAGE_PARTS = ("image", "image_url", "input_image")  # those that are images
IMAGES = ("images", "image")
"""Columns of a row's images, of which the first one that is not empty is read."""


@dataclass(frozen=True)
class DatasetRow:
    """A row as it stands in a file or data set, and where, for error messages."""

    fields: dict[str, Any]
    location: str
    error: str = ""  # why it cannot be read; empty if it can. It names the location.

    def name(self, column: str) -> str:
        return f"{self.location}: `{column}`"


@dataclass(frozen=True, slots=True)
class Row:
    """What a row means."""

    prompt: str | Messages
    answer: str | Messages | None = None
    tools: Tools | None = None
    arguments: Arguments | None = None  # of the chat template, for this row alone
    whole: bool = False  # `prompt` is a text that can be learned as a whole
    columns: tuple[str, ...] = ()  # those that were read
    unused: tuple[str, ...] = ()  # those that were not, and hold something
    images: tuple[Any, ...] = ()  # what a column of IMAGES holds

    def question(self) -> str | Messages | None:
        """The prompt; of a chat all before its last reply. None for a chat in which nobody asks."""
        if isinstance(self.prompt, str):
            return self.prompt
        chat = [*self.prompt]
        while chat and chat[-1]["role"] == "assistant":
            chat.pop()
        return chat or None

    def answered(self) -> Content | None:
        """The prompt with its answer, or a whole text; a chat ends with a reply. None if there is no answer."""
        if isinstance(self.prompt, str) and not isinstance(self.answer, list):
            if self.answer is not None:
                return self.prompt, self.answer
            return self.prompt if self.whole else None
        chat = _as_chat(self.prompt, "user") + _as_chat(self.answer or [], "assistant")
        while chat and chat[-1]["role"] != "assistant":
            chat.pop()
        return chat if any(message["role"] != "assistant" for message in chat) else None

    def describe(self) -> str:
        """Such as "read as messages (columns messages, tools); not used: prompt, prompt_id"."""
        kind = "prompt and answer" if self.answer is not None else self.columns[0]
        line = f"read as {kind} (columns {', '.join(self.columns)})"
        return f"{line}; not used: {', '.join(self.unused)}" if self.unused else line


def read_row(
    item: DatasetRow, answered: bool, column: str = "", answer: str = "", with_images: bool = False
) -> Row | None:
    """What the row means; None if it has columns for a prompt and they are empty. Answers are read if `answered`.

    `column` and `answer` name the columns of the prompt and of its answer; empty: found by FORMS. UserError, which says
    where the row stands, for columns that are none of these, for values that are no prompt, and for images in a prompt
    unless they are read `with_images`: as the row has them, None for one that stands in a column of IMAGES.
    """
    fields, where = item.fields, item.location
    for name in (column, answer):
        if name and name not in fields:
            raise UserError(f"{where}: no column {name!r}: choose among {list(fields)}")
    own = [form for form in FORMS if form.column == column] or [RowForm(column, whole=True)]
    found = own if column else [form for form in FORMS if form.column in fields]
    if not found:
        names = ", ".join(f"`{form.column}`" for form in FORMS)
        more = f" and {len(fields) - LISTED} more" if len(fields) > LISTED else ""
        raise UserError(
            f"{where}: needs a column {names}, or a source whose `column` names it; it has "
            f"{', '.join([*fields][:LISTED]) or 'none'}{more}"
        )
    for form in found:
        prompt = _text_or_chat(fields[form.column], item.name(form.column), form.chat, with_images)
        if prompt is not None:
            break
    else:
        return None
    columns: list[str] = [form.column]
    reply: str | Messages | None = None
    after = fields.get(form.input)
    if isinstance(prompt, str) and isinstance(after, str):
        prompt = f"{prompt}\n\n{after}" if after.strip() else prompt
        columns.append(form.input)  # read, though it may be empty: rows of one set have one form
    for name in ((answer,) if answer else form.answers) if answered else ():
        if name == "answers":
            calls = _read_calls(fields.get(name), item.name(name))
            reply = [{"role": "assistant", "tool_calls": calls}] if calls else None
        else:
            reply = _text_or_chat(fields.get(name), item.name(name))
        if reply is not None:
            columns.append(name)
            break
    if reply is not None and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise UserError(
            f"{item.name(form.column)} ends with a reply, and `{columns[-1]}` is another: drop one"
        )
    if isinstance(reply, list) and reply[0]["role"] in ("system", "user"):
        raise UserError(
            f"{item.name(columns[-1])} is a whole chat, not an answer: name it as `column` alone"
        )
    # The tools of a text that is learned as it stands are in it, if anywhere.
    tools = None if answered and form.whole and reply is None else read_tools(item)
    columns += [TOOLS] if tools else []
    arguments = read_arguments(item)
    columns += [ARGUMENTS] if arguments else []
    held = next((name for name in IMAGES if with_images and fields.get(name)), None)
    columns += [held] if held else []
    found_images = fields[held] if held else []
    images = tuple(found_images if isinstance(found_images, list) else [found_images])
    unused = tuple(name for name, v in fields.items() if name not in columns and v is not None)
    return Row(prompt, reply, tools, arguments, form.whole, tuple(columns), unused, images)


def drop_arrow_nulls(
    fields: Mapping[str, Any], features: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A row of an Arrow table (Parquet, `datasets`) without the null fields of the objects in its columns.

    All objects of a column have the fields of all: what a row did not say is null there, and cannot be told from a null
    that it said. The row's own columns and the nulls of lists stay: Arrow adds none. Nor does it where `features`, the
    types of the columns in `datasets`, have JSON: that, as JSON lines, holds what the row said.
    """
    kinds = features or {}
    return {column: _without_nulls(value, kinds.get(column)) for column, value in fields.items()}


def _without_nulls(value: Any, kind: Any) -> Any:
    """`value` without null fields; `kind` is its type in `datasets`, None if that is not known."""
    if type(kind).__name__ == "Json":  # without an import of `datasets`, which takes seconds
        return value
    if isinstance(value, list):
        inner = vars(kind).get("feature") if hasattr(kind, "__dict__") else None
        return [_without_nulls(item, inner) for item in value]
    if not isinstance(value, dict):
        return value
    inner = kind if isinstance(kind, dict) else {}
    said = {name: item for name, item in value.items() if item is not None}
    return {name: _without_nulls(item, inner.get(name)) for name, item in said.items()}


def check_said(chat: Messages, where: str) -> None:
    """UserError for a message of the user or the assistant that says and calls nothing."""
    for number, message in enumerate(chat, 1):
        if message["role"] in ("user", "assistant") and not message.get("tool_calls"):
            content = message["content"]
            if isinstance(content, str) and content.strip() == "":
                raise UserError(f"{where}: message {number} ({message['role']}) is empty")


def message_text(message: Mapping[str, Any]) -> str:
    """A message's content; "" if it only calls tools. An image is a line with its name."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part[part["type"]] for part in content)


def _as_chat(said: str | Messages, role: str) -> Messages:
    return [{"role": role, "content": said}] if isinstance(said, str) else said


def _text_or_chat(
    value: Any, what: str, chat: bool = False, with_images: bool = False
) -> str | Messages | None:
    """The text, or the checked messages of a list or of its JSON; None if there is nothing.

    UserError for anything else, and with `chat` for a text that is not the JSON of messages.
    """
    value = _parse_if(value, lambda v: _is_chat(v) or (chat and v in (None, [])), what)
    if value is None or value == [] or (isinstance(value, str) and value.strip() == ""):
        return None
    if isinstance(value, list):
        return [_read_message(item, what, with_images) for item in value]
    if chat and isinstance(value, str):
        raise UserError(
            f"{what} is no list of messages, nor the JSON of one: correct it, or name another column "
            "(`column` of the source)"
        )
    if not isinstance(value, str):
        raise UserError(f"{what} must be text or a list of messages, not {value!r:.40}")
    return value


def _read_message(item: Any, what: str, with_images: bool) -> dict[str, Any]:
    """The message without its empty fields, its role by its usual name, its content as text, or `with_images` as parts
    of which some are images.

    UserError unless it has a role, and a text (or parts that are texts) or the calls of tools.
    """
    item = _parse_if(item, _is_object, what)
    message = {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else {}
    speaker = message.get("role", message.get("from"))
    named = str(speaker).lower()
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    if named in ROLES:
        if "role" not in message:  # of the messages of ShareGPT no template knows another field
            message = {k: message[k] for k in ("content", "tool_calls") if k in message}
        message = {**message, "role": ROLES[named]}
    if named in CALLS:
        calls = _read_calls(message.pop("content", None), what)
    elif "tool_calls" not in message:
        calls = _read_calls(message.pop("function_call", None), what)
    else:
        calls = _parse_if(message["tool_calls"], _is_objects, what)
        calls = [_read_call(call, what) for call in calls] if isinstance(calls, list) else calls
    if calls:
        message["tool_calls"] = calls
    content = message.get("content")
    if isinstance(content, list) and content and all(map(_is_text, content)):
        texts = (part if isinstance(part, str) else part["text"] for part in content)
        message["content"] = "\n".join(texts)
    content = message.get("content")
    if with_images and isinstance(content, list):
        message["content"] = [_read_part(part, what) for part in content]
    complete = (
        isinstance(content, str)
        or (with_images and isinstance(content, list) and len(content) > 0)
        or ("content" not in message and calls and message.get("role") == "assistant")
    )
    if not isinstance(message.get("role"), str) or not complete:
        raise UserError(
            f"{what}: every message needs `role` and `content` as text, not {item!r:.60}"
        )
    return message


def _read_part(part: Any, what: str) -> dict[str, Any]:
    """A part of a content as {type: text, text: …} or {type: image, image: …}, the image as the part has it, None if it
    only says where one stands. UserError for anything else."""
    if _is_text(part):
        return {"type": "text", "text": part if isinstance(part, str) else part["text"]}
    if not isinstance(part, dict) or part.get("type") not in IMAGE_PARTS:
        raise UserError(f"{what}: of a content texts and images are read, not {part!r:.60}")
    names = ("image", "image_url", "url", "path")
    source = next((part[name] for name in names if part.get(name)), None)
    if isinstance(source, dict) and "url" in source:
        source = source["url"]
    return {"type": "image", "image": source}


def _read_call(call: Any, what: str) -> Any:
    """A call as requests have it, of one in verifiers' form, or of the JSON of one; any other as it is."""
    call = _parse_if(call, _is_object, what)
    if not isinstance(call, dict) or {*call} != {"id", "name", "arguments"}:
        return call
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}


def _read_calls(value: Any, what: str) -> Tools | None:
    """The tool calls in an object of `name` and `arguments`, a list of such, or the JSON of it; None for all else."""
    value = _parse_if(value, lambda parsed: _is_object(parsed) or _is_objects(parsed), what)
    found = [value] if isinstance(value, dict) else value
    if not isinstance(found, list) or not found:
        return None
    if not all(isinstance(call, dict) and {*call} == {"name", "arguments"} for call in found):
        return None
    return [{"type": "function", "function": call} for call in found]


def read_tools(row: DatasetRow) -> Tools | None:
    """The schemas in the row's column `tools`, a list or its JSON; None for none. UserError for anything else."""
    value, what = row.fields.get(TOOLS), row.name(TOOLS)
    value = _parse_if(value, lambda parsed: parsed is None or isinstance(parsed, list), what)
    if isinstance(value, list):
        value = [_parse_if(tool, _is_object, what) for tool in value]
    if not value or (isinstance(value, str) and value.strip() == ""):
        return None
    if not _is_objects(value):
        raise UserError(
            f"{what} must be a list of objects, not {value!r:.40}: correct or rename it"
        )
    return [_read_tool(tool, what) for tool in value]


def read_arguments(row: DatasetRow) -> Arguments | None:
    """The row's own arguments of the chat template, an object or its JSON; None for none. UserError for others."""
    value, what = row.fields.get(ARGUMENTS), row.name(ARGUMENTS)
    value = _parse_if(value, lambda parsed: parsed is None or _is_object(parsed), what)
    if not value:
        return None
    if not isinstance(value, dict):
        raise UserError(f"{what} must be an object, not {value!r:.40}: correct or rename it")
    # Arrow gives every row the fields of all: null says nothing.
    said = {name: item for name, item in value.items() if item is not None}
    check_arguments(said, what)
    return said or None


def _read_tool(tool: dict[str, Any], what: str) -> dict[str, Any]:
    """The schema, with its parameters as an object where they are the JSON of one."""
    if isinstance(tool.get("function"), dict):
        return tool | {"function": _read_tool(tool["function"], what)}
    if not isinstance(tool.get("parameters"), str):
        return tool
    return tool | {"parameters": _parse_if(tool["parameters"], _is_object, what)}


def _parse_if(value: Any, fits: Callable[[Any], bool], what: str) -> Any:
    """The value that a text is the JSON of, if that one `fits`; else `value` itself."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parse_json(value, what, "correct it") if fits(parsed) else value


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _is_chat(value: Any) -> bool:
    speaks, says = {"role", "from"}, {"content", "value", "tool_calls", "function_call"}
    return (
        _is_objects(value)
        and len(value) > 0
        and not any(speaks.isdisjoint(item) or says.isdisjoint(item) for item in value)
    )


def _is_text(part: Any) -> bool:
    if isinstance(part, dict):
        return part.get("type", "text") in TEXT_PARTS and isinstance(part.get("text"), str)
    return isinstance(part, str)
