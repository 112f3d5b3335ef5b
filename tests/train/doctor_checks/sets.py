"""Small sampled sets of a byte tokenizer with a chat template, clean or with a planted defect, and the real command."""

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerFast

from decode.common.chat.render import ChatTemplate
from decode.model.loading import tokenizer_fingerprint
from tests import worlds
from tests.rows import sample_row
from tests.tiny import tiny_config
from tests.worlds import byte_tokenizer
from train.data import manifest, sample_store
from train.data.conversations import conversation_with_replies, join_turns, make_prompt
from train.data.sample_store import SampleRow

END = 1
"""The token <1>, which ends a turn in CHATML."""
CHATML = (
    "{% for m in messages %}<2>{{ m['role'] }}\n{{ m['content'] }}<1>\n{% endfor %}"
    "{% if add_generation_prompt %}<2>assistant\n{% endif %}"
)
REASONING = (  # as Qwen3's: of earlier replies only what follows the reasoning stays
    "{% for m in messages %}<2>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1].lstrip() }}"
    "{% else %}{{ m['content'] }}{% endif %}<1>\n{% endfor %}"
    "{% if add_generation_prompt %}<2>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n</think>\n{% endif %}{% endif %}"
)
ROWS = 24


def save_target(
    folder: Path, template: str | None = CHATML, bos: bool = False, ends: Sequence[int] = (END,)
) -> PreTrainedTokenizerFast:
    """A target's tokenizer, config and generation config in `folder`, without weights; <3> is its BOS if it has one."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    if bos:
        tokenizer.bos_token = "<3>"
    tokenizer.save_pretrained(folder)
    size: dict[str, Any] = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    tiny_config("llama", **size).save_pretrained(folder)
    GenerationConfig(eos_token_id=list(ends)).save_pretrained(folder)
    return tokenizer


def words(seed: str, count: int) -> str:
    """Words that occur in no evaluation prompt."""
    rng = random.Random(seed)
    return " ".join("zq" + "".join(rng.choices("abcdefghijkl", k=4)) for _ in range(count))


def chats(count: int = ROWS) -> list[list[dict[str, Any]]]:
    """Different chats; every third has two turns."""
    made = []
    for i in range(count):
        turns = [words(f"u{i}", 6), words(f"a{i}", 5)]
        turns += [words(f"v{i}", 4), words(f"b{i}", 5)] if i % 3 == 0 else []
        roles = ("user", "assistant")
        made.append([{"role": roles[j % 2], "content": text} for j, text in enumerate(turns)])
    return made


def row_of(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> SampleRow:
    """The chat as the sampling command would store it, had the target given these replies."""
    asked = make_prompt("chats", messages[:-1])
    whole = make_prompt("chats", messages)
    script = conversation_with_replies(ChatTemplate(tokenizer), whole, "all", frozenset({END}))
    ids, spans = join_turns(script.prompt_segments, script.replies)
    return sample_row(ids, spans, asked.id, "chats")


def text_row(tokenizer: PreTrainedTokenizerFast, name: str, *parts: str) -> SampleRow:
    """A row of texts that are read and supervised by turns."""
    ids: list[int] = []
    spans = []
    for i, part in enumerate(parts):
        start = len(ids)
        ids += tokenizer(part, add_special_tokens=False)["input_ids"]
        spans += [[start, len(ids)]] if i % 2 else []
    return sample_row(ids, spans, f"{name}#0", "texts")


def clean_rows(tokenizer: PreTrainedTokenizerFast) -> list[SampleRow]:
    return [row_of(tokenizer, messages) for messages in chats()]


def save_set(
    folder: Path, tokenizer: PreTrainedTokenizerFast, rows: list[SampleRow], template: str = ""
) -> Path:
    """The rows as a finished sampled set, made with the tokenizer's template or with another one."""
    sample_store.write_shard(folder, rows)
    template = template or tokenizer.chat_template or ""
    digest = hashlib.sha256(template.encode()).hexdigest()[:16] if template else None
    fingerprint = tokenizer_fingerprint(tokenizer)
    made = manifest.Manifest("t", None, fingerprint, digest, {}, 0, {}, None, {})
    manifest.write_manifest(folder, made)
    return folder


def examine(target: Path, data: object, *arguments: object) -> dict[str, Any]:
    """What the command finds: the JSON of its last line, with `found`, {name of a finding: the finding}."""
    done = worlds.call("train/doctor.py", "--data", data, "--target", target, *arguments).ok()
    result: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    result["found"] = {finding["name"]: finding for finding in result["findings"]}
    return result


def graves(result: dict[str, Any]) -> list[str]:
    """Names of the findings that stop or cost."""
    return [f["name"] for f in result["findings"] if f["severity"] != "note"]
