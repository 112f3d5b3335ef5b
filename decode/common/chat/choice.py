"""The setting `template`: which of a tokenizer's chat templates renders prompts, and with which arguments.

    --template '{enable_thinking: false}'      the arguments of the template
    --template tool_use                        one of several templates, by its name
    --template '{name: rag, date: 2026-01-31}' both
    --template none                            plain text, as for a tokenizer without a template

A row's own arguments (`chat_template_kwargs`) stand above those of the setting, as those of a request stand above a
server's.
"""

import copy
import functools
import json
import keyword
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jinja2
from jinja2 import nodes

from decode.common.errors import UserError
from decode.common.ranges import Meaning

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]
"""What a chat may call: JSON schemas of functions."""
Arguments = dict[str, Any]
"""A chat's own arguments of the template, such as {"enable_thinking": False}."""
TemplateSetting = str | dict[str, Any]
TrainedTemplate = Annotated[
    TemplateSetting | None,
    Meaning(
        "How the chat template renders prompts, as in train/sample.py: its arguments, such as "
        "'{enable_thinking: false}', or the name of one of several. null: as in the training of the draft; '{}': the "
        "tokenizer's own."
    ),
]
"""The setting where a draft was trained already."""
NAME, NONE, DEFAULT, TOOL_USE = "name", "none", "default", "tool_use"
"""Key of the template's name in the setting; the name of no template; the names of those that transformers and servers
take where no name is given: the second for chats with tools."""
RESERVED = {
    "name", "messages", "conversation", "tools", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens",
}  # fmt: skip
"""What a template gets from elsewhere, and parameters of `apply_chat_template`, which reach no template."""
GIVEN = {
    "messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "unk_token",
    "sep_token", "pad_token", "cls_token", "mask_token", "raise_exception", "strftime_now", "range",
    "dict", "lipsum", "cycler", "joiner", "namespace", "loop", "caller", "varargs", "kwargs",
}  # fmt: skip
"""Names that every template may read."""
PROBED = "zq_given"
"""A value for arguments that nobody gave, which shows where they are printed."""


def read_setting(setting: TemplateSetting | None) -> dict[str, Any]:
    """The setting as {"name": …, argument: value, …}; {} for the tokenizer's own template without arguments.

    UserError for what cannot be an argument.
    """
    if not isinstance(setting, dict):
        return {NAME: setting} if setting else {}
    name, arguments = _name_and_arguments(setting)
    if not isinstance(name, str):
        raise UserError(f"--template: name is {name!r:.40}, give the name of a chat template")
    check_arguments(arguments, "--template")
    if name == NONE and arguments:
        raise UserError("--template: without a template (name: none) there are no arguments")
    return ({NAME: name} if name else {}) | arguments


def _name_and_arguments(setting: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    return setting.get(NAME, ""), {key: value for key, value in setting.items() if key != NAME}


def check_arguments(arguments: Mapping[str, Any], what: str) -> None:
    """UserError, which begins with `what`, unless a template can be given these arguments."""
    for name, value in arguments.items():
        if name in RESERVED:
            raise UserError(f"{what}: {name} is no argument that can be given to a chat template")
        if not str(name).isidentifier() or keyword.iskeyword(name):
            raise UserError(f"{what}: {name!r:.40} cannot be the name of an argument")
        if not _is_plain(value):
            raise UserError(
                f"{what}: {name} is {value!r:.40}: give a text, a number, true, false, a list or a mapping"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and _is_plain([*value.values()])
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int) or math.isfinite(value)


def with_template(tokenizer: Any, setting: Mapping[str, Any]) -> Any:
    """A copy of the tokenizer (or processor) whose chat template is the one that `setting` (from `read_setting`) names,
    the setting's arguments being its defaults; the tokenizer itself for {}.

    UserError for a name that it does not have, and for several templates of which none is the default.
    """
    name, arguments = _name_and_arguments(setting)
    chosen = _chosen(tokenizer.chat_template, name)
    if not setting:
        return tokenizer
    defaults = "".join(
        # trim_blocks drops the line break behind a block
        f"{{% set {key} = {key} if {key} is defined and {key} is not none else {value!r} %}}\n"
        for key, value in arguments.items()
    )
    made = copy.copy(tokenizer)
    texts = {key: defaults + text for key, text in chosen.items()}
    made.chat_template = texts.get("", texts or None)
    return made


def check_setting(tokenizer: Any, setting: Mapping[str, Any]) -> None:
    """UserError for a setting without effect: an argument that the chat template does not read, or no template."""
    name, arguments = _name_and_arguments(setting)
    if tokenizer.chat_template is None and name != NONE and setting:
        raise UserError(
            f"the target's tokenizer has no chat template: drop --template {describe(setting)}"
        )
    names = [names_in(text) for text in _chosen(tokenizer.chat_template, name).values()]
    known = ", ".join(sorted({key for one in names for key in one.arguments}))
    for key in arguments:
        if not any(one.read is None or key in one.read for one in names):
            reads = f"it reads {known}" if known else "it reads none"
            raise UserError(f"--template: the chat template does not read {key}; {reads}")


def _chosen(own: str | dict[str, str] | None, name: str) -> dict[str, str]:
    """{"": the template of that name}; without a name those that are taken by default, {} for no template."""
    if name == NONE or own is None:
        return {}
    if not isinstance(own, dict):
        if name in ("", DEFAULT):
            return {"": own}
        others = "it has one, unnamed"
    elif name in own:
        return {"": own[name]}
    elif not name and DEFAULT in own:
        return {key: own[key] for key in (DEFAULT, TOOL_USE) if key in own}
    else:
        others = f"choose among {', '.join(sorted(own))}"
    if not name:
        names = sorted(own)
        raise UserError(
            f"the target has the chat templates {', '.join(names)}, and none is the default: choose one, such as "
            f"--template {names[0]}"
        )
    raise UserError(f"the target has no chat template {name!r:.60}: {others}")


def describe(setting: Mapping[str, Any]) -> str:
    """The setting as one would write it behind --template, such as '{enable_thinking: false}'."""
    if not setting:
        return "the tokenizer's own"
    if set(setting) == {NAME}:
        return str(setting[NAME])
    written = (f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in setting.items())
    return f"'{{{', '.join(written)}}}'"


def undefined_argument(text: str, error: Exception) -> str:
    """The argument whose lack is the template's error; "" for any other error."""
    name = re.match(r"'(\w+)' is undefined", str(error))
    is_argument = name is not None and name[1] in names_in(text).arguments
    return name[1] if name and is_argument and isinstance(error, jinja2.UndefinedError) else ""


def missing_argument_error(name: str) -> UserError:
    return UserError(
        f"the target's chat template needs {name}, which nobody gave: add --template '{{{name}: …}}', or "
        f"chat_template_kwargs to the row"
    )


class TemplateNames(NamedTuple):
    """The names in a template."""

    read: frozenset[str] | None
    """None for a template that is no Jinja: it may read anything."""
    arguments: frozenset[str]
    """Those read that it neither sets itself nor is always given."""
    needed: frozenset[str]
    """Arguments that are read where no condition on them was asked before: where nobody gives them, the text may have
    a hole."""


@functools.lru_cache(256)
def names_in(text: str) -> TemplateNames:
    plain = re.sub(r"{%[-+]?\s*(end)?generation\s*[-+]?%}", "", text)  # a tag of transformers
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except jinja2.TemplateError:
        return TemplateNames(None, frozenset(), frozenset())
    names = list(tree.find_all(nodes.Name))
    bound = {name.name for name in names if name.ctx != "load"}
    bound |= {macro.name for macro in tree.find_all(nodes.Macro)}
    read = frozenset(name.name for name in names if name.ctx == "load")
    arguments = read - bound - GIVEN
    return TemplateNames(read, arguments, arguments & _unconditional(tree))


def _unconditional(node: nodes.Node) -> set[str]:
    """Names that are read where no condition on them was asked before."""
    if isinstance(node, nodes.Name):
        return {node.name} if node.ctx == "load" else set()
    if isinstance(node, nodes.Test | nodes.Compare | nodes.And | nodes.Or | nodes.Not):
        return set()  # what is undefined is false there
    children = list(node.iter_child_nodes())
    asked: set[str] = set()
    if isinstance(node, nodes.If | nodes.CondExpr):
        asked = {name.name for name in node.test.find_all(nodes.Name)}
        asked |= {node.test.name} if isinstance(node.test, nodes.Name) else set()
        children.remove(node.test)
    if isinstance(node, nodes.For):
        children.remove(node.iter)  # what is undefined has no items
    if isinstance(node, nodes.Filter) and node.name in ("default", "d") and node.node is not None:
        children.remove(node.node)
    return set().union(*map(_unconditional, children)) - asked
