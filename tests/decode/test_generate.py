"""The command that continues one prompt: what it prints, and in which style."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode import continuation, generate
from decode.common.chat.render import ChatTemplate
from decode.common.errors import UserError
from decode.continuation import styled_spans, summary_line
from decode.drafts.base import Draft
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.mirror import MirrorConfig
from decode.drafts.registry import pick_draft
from decode.drafts.settings import GenerateConfig
from decode.engine.records import DecodeRecord, RoundRecord
from decode.model import loading
from decode.model.loading import Target
from tests.decode.engine.test_text_stream import llama, metaspace
from tests.tiny import tiny_config, tiny_model, tiny_target
from tests.worlds import byte_tokenizer


def record(accepted: int, proposed: list[int], tokens: list[int]) -> RoundRecord:
    return RoundRecord(0, False, len(proposed), accepted, proposed, tokens, None, 0.0)


def test_spans_stand_in_order_and_empty_ones_are_left_out() -> None:
    """Catches accepted tokens printed as rejected ones, a bonus token in the wrong place, and hidden tokens printed."""
    one = record(2, [1, 2, 3, 4], [1, 2, 9])
    assert styled_spans(one, rejected=True) == [
        ([1, 2], "green"),
        ([3, 4], "red strike"),
        ([9], "bold blue"),
    ]
    assert styled_spans(one, rejected=False) == [([1, 2], "green"), ([9], "bold blue")]
    assert styled_spans(record(0, [], [9]), rejected=True) == [([9], "bold blue")]


def test_the_summary_counts_tokens_and_rounds() -> None:
    """Catches the prefill's token counted into τ, and a division by zero without rounds or drafts."""
    output = DecodeRecord([1], [5, 6, 7, 8], [(3, 2), (3, 0)], "length")
    assert summary_line(output, 2.0) == (
        "4 tokens in 2.00 s, 2.0 tokens/s, 2 rounds, τ 1.50, "
        "2 of 6 drafted tokens accepted, ended by length"
    )
    assert summary_line(DecodeRecord([1], [5], [], "eos"), 1.0) == (
        "1 tokens in 1.00 s, 1.0 tokens/s, 0 rounds, ended by eos"
    )


def test_a_missing_prompt_is_an_error(tmp_path: Path) -> None:
    """Catches an empty prompt that is decoded, and a stack trace for a file that is not there."""
    with pytest.raises(UserError, match="--prompt_file"):
        generate.main(GenerateConfig())
    with pytest.raises(UserError, match=r"none\.txt does not exist"):
        generate.main(GenerateConfig(prompt_file=str(tmp_path / "none.txt")))


def test_two_prompts_are_an_error(tmp_path: Path) -> None:
    """Catches one of two prompts that is dropped in silence."""
    file = tmp_path / "prompt.txt"
    file.write_text("from a file")
    with pytest.raises(UserError, match="give --prompt or --prompt_file, not both"):
        generate.main(GenerateConfig(prompt="given", prompt_file=str(file)))


def pick(name: str, target: Target, dtype: str) -> Draft | None:
    """As in the command, and `exit` for the target's first layer."""
    return EarlyExitDraft(target, 1) if name == "exit" else pick_draft(name, target, dtype)


def test_outside_a_terminal_the_text_is_that_of_the_target(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches rejected tokens, escape codes or line breaks mixed into text that goes to a file."""

    class Words:
        """A tokenizer whose words are their ids."""

        chat_template = None
        bos_token_id = None

        def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
            return {"input_ids": [[int(word) for word in text.split()] for text in texts]}

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "".join(f" {i}" for i in ids)

    target = replace(tiny_target(tiny_model("llama")), tokenizer=Words())
    monkeypatch.setattr(continuation, "load_target", lambda *args: target)
    texts = []
    monkeypatch.setattr(continuation, "pick_draft", pick)
    ways = [("none", "", 0.0), ("ngram", "", 0.0), ("exit", "suffix", 0.0), ("exit", "", 0.3)]
    for draft, lookup, confidence in [*ways, ("exit", "ngram", 0.5)]:
        settings = GenerateConfig(
            prompt="3 4 3 4 3", draft=draft, lookup=lookup, min_match=2, max_new_tokens=40,
            confidence=confidence,
        )  # fmt: skip
        generate.main(settings)
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    assert len(texts[0].split()) == 5 + 40
    assert "\x1b" not in texts[0]
    with pytest.raises(UserError, match="has no model whose passes"):
        generate.main(GenerateConfig(prompt="3 4", draft="none", confidence=0.3))
    with pytest.raises(UserError, match="mirror needs a small language model"):
        generate.main(GenerateConfig(prompt="3 4", draft="exit", mirror=MirrorConfig(1)))


def cycling_target(tokenizer: Any, ids: list[int]) -> Target:
    """Continues each token of `ids`, which are all different, with the one behind it, and the last with the first."""
    size = (len(tokenizer) + 3) // 4 * 4
    model = tiny_model(
        "llama", vocab_size=size, hidden_size=size, head_dim=8, max_position_embeddings=256
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(size))
        head = model.get_output_embeddings().weight.zero_()
        head[ids[1:] + ids[:1], ids] = 1
    return replace(tiny_target(model), tokenizer=tokenizer)


def byte_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.convert_tokens_to_ids(
        [f"<0x{value:02X}>" for value in text.encode()]
    )
    return ids


CYCLES: dict[str, Callable[[], tuple[Any, list[int], str]]] = {
    "bytes": lambda: (
        byte_tokenizer(), byte_tokenizer()("🙂é字 a", add_special_tokens=False)["input_ids"], "🙂é字 a",
    ),
    "accents and tabs": lambda: (
        byte_tokenizer(), byte_tokenizer()("ü\t字\r b\n", add_special_tokens=False)["input_ids"], "ü\t字\r b\n",
    ),
    "spaces": lambda: (
        llama(True), llama(True).convert_tokens_to_ids(["▁a", "▁é", "▁", "▁▁", "b", "▁."]), " a é   b .",
    ),
    "byte tokens": lambda: (
        (t := llama(True)), [*byte_ids(t, "🙃"), t.convert_tokens_to_ids("▁é")], "🙃 é",
    ),
    "metaspace": lambda: (
        metaspace(), metaspace().convert_tokens_to_ids(["▁a", "▁é", "字", "▁▁", "b"]), " a é字  b",
    ),
}  # fmt: skip


def encode_last(ids: list[int]) -> Callable[[Any, str], list[int]]:
    """A prompt of two rounds of the cycle, so that the lookup drafts."""
    return lambda template, text: ids * 2


@pytest.mark.parametrize("kind", CYCLES)
@pytest.mark.parametrize("draft", ["none", "ngram", "exit"])
def test_what_is_printed_is_the_text(
    kind: str, draft: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches characters broken, and spaces and tabs lost, where a round ends; in a terminal with colours too."""
    tokenizer, ids, text = CYCLES[kind]()
    target = cycling_target(tokenizer, ids)
    monkeypatch.setattr(continuation, "load_target", lambda *args: target)
    monkeypatch.setattr(continuation, "pick_draft", pick)
    monkeypatch.setattr(ChatTemplate, "encode", encode_last(ids))
    settings = GenerateConfig(prompt="PROMPT", draft=draft, k=3, max_new_tokens=5 * len(ids))
    generate.main(settings)
    assert capsys.readouterr().out == f"PROMPT{text * 5}\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    generate.main(replace(settings, rejected=False))
    coloured = capsys.readouterr().out
    shown = "".join(c for c in text if c != "\r")  # it would move the cursor
    assert re.sub("\x1b\\[[0-9;]*m", "", coloured) == f"PROMPT{shown * 5}\n"
    assert ("\x1b[32m" in coloured) == (draft != "none")
    generate.main(replace(settings, draft="none"))
    assert "\ufffd" not in capsys.readouterr().out


def test_rejected_tokens_show_whole_characters_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches the first bytes of a rejected character printed as a broken one, and accepted text that is struck out."""
    tokenizer = byte_tokenizer()

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    half, rest = ids("🙂")[:2], ids("🙂")[2:]
    rounds = [
        record(2, [*half, *ids("xé")], [*half, rest[0]]),
        record(1, [rest[1], *ids("字")[:2]], [rest[1], *ids("!")]),
    ]
    target = replace(tiny_target(tiny_model("llama")), tokenizer=tokenizer)
    monkeypatch.setattr(continuation, "load_target", lambda *args: target)
    monkeypatch.setattr(ChatTemplate, "encode", lambda *args: ids("p"))
    monkeypatch.setattr(continuation, "speculate", lambda *args, **settings: iter(rounds))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    generate.main(GenerateConfig(prompt="p", draft="none"))
    out = capsys.readouterr().out.strip()
    # The emoji is green: the last of its tokens was accepted.
    assert out == "p\x1b[9;31mxé\x1b[0m\x1b[32m🙂\x1b[0m\x1b[1;34m!\x1b[0m"


@pytest.mark.parametrize(
    ("device", "stored", "emulated", "dtype"),
    [
        ("cuda", torch.bfloat16, False, "bfloat16"), ("cuda", torch.bfloat16, True, "float16"),
        ("cuda:1", torch.float16, True, "float16"), ("cuda", torch.float32, False, "float32"),
        ("cuda", None, False, "bfloat16"), ("cpu", torch.bfloat16, False, "float32"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("asked", ["", "int8"])
def test_a_gpu_computes_in_the_checkpoint_s_dtype(
    device: str, stored: torch.dtype | None, emulated: bool, dtype: str, asked: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """Catches weights of two bytes that are loaded as four, bfloat16 on a card that emulates it, another dtype of the
    draft, and another dtype on a CPU than before."""
    config = tiny_config("qwen3")
    config.dtype = stored
    config.save_pretrained(tmp_path)
    found: list[str] = []

    def load(placement: Any, name: str, device: str, dtype: str, revision: Any) -> Target:
        found.append(dtype)
        made = tiny_target(tiny_model("llama"))
        return replace(made, tokenizer=byte_tokenizer(), dtype=dtype)

    def pick(name: str, target: Target, dtype: str) -> Draft:
        found.append(dtype)
        raise UserError("enough")

    monkeypatch.setattr(loading, "pick_device", lambda name: device)
    monkeypatch.setattr(loading, "has_bfloat16", lambda: not emulated)
    monkeypatch.setattr(continuation, "load_target", load)
    monkeypatch.setattr(continuation, "pick_draft", pick)
    more = {"dtype": asked} if asked else {}
    with pytest.raises(UserError, match="enough"):
        generate.main(GenerateConfig(prompt="3", target=str(tmp_path), device=device, **more))
    assert found == [asked or dtype] * 2
