"""Every recipe of configs/distill, run on its real architecture with its family's chats, only smaller."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from decode.checkpoints import eagle_layouts, layouts
from decode.common.chat.render import ChatTemplate
from decode.common.errors import UserError
from decode.common.progress import format_bytes
from decode.common.settings import parse_settings
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import DTYPES, auto_class, load_target
from tests import worlds
from tests.decode.engine.test_engine import hf_text
from train import answering
from train.data import batching, sample_store
from train.data.conversations import Conversation, Prompt, encode_prompt
from train.data.prompt_pipeline import TargetTokenizer, TokenizedPrompt
from train.families.dflash import default_taps
from train.families.registry import TRAINED_FAMILIES
from train.planning import resources, shape_run
from train.planning.shape_run import ShapeRun, StepWorkload
from train.sampling.config import SampleConfig
from train.sampling.rows import make_row
from train.trainer.settings import DistillConfig

RECIPES = worlds.ROOT / "configs" / "distill"
PEAK = 989e12  # bf16 operations a second of an H100 or H200
SHARE = 0.35  # what a run may get of them

# ---- the published shapes, and small ones of the same kind ----

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA: dict[str, Any] = {"vocab_size": 128256, "rms_norm_eps": 1e-5, "num_key_value_heads": 8}
LLAMA |= {"max_position_embeddings": 131072, "rope_parameters": LLAMA3}
QWEN2: dict[str, Any] = {"max_position_embeddings": 32768, "rope_theta": 1e6}
QWEN: dict[str, Any] = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
QWEN |= {"max_position_embeddings": 40960, "rope_theta": 1e6}
APART, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}


def sizes(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    wide = {"hidden_size": hidden, "intermediate_size": inner}
    return wide | {"num_hidden_layers": layers, "num_attention_heads": heads}


GEMMA: dict[str, Any] = {
    "text_config": sizes(3840, 15360, 48, 16)
    | {"vocab_size": 262208, "num_key_value_heads": 8, "sliding_window": 1024}
    | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},  # as on the hub
    "vision_config": sizes(1152, 4304, 27, 16) | {"image_size": 896, "patch_size": 14},
}
PUBLISHED: dict[str, tuple[str, dict[str, Any], float]] = {
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", LLAMA | sizes(4096, 14336, 32, 32), 8.03),
    "meta-llama/Llama-3.3-70B-Instruct": ("llama", LLAMA | sizes(8192, 28672, 80, 64), 70.55),
    "Qwen/Qwen3-8B": ("qwen3", QWEN | APART | sizes(4096, 12288, 36, 32), 8.19),
    "Qwen/Qwen3-0.6B": ("qwen3", QWEN | TIED | sizes(1024, 3072, 28, 16), 0.596),
    "Qwen/Qwen3-4B": ("qwen3", QWEN | TIED | sizes(2560, 9728, 36, 32), 4.02),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (
        "qwen3_moe",
        QWEN | APART | sizes(2048, 6144, 48, 32) | {"num_key_value_heads": 4, "num_experts": 128}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"max_position_embeddings": 262144, "rope_theta": 1e7},
        30.53,
    ),
    "Qwen/Qwen2.5-Coder-7B-Instruct": (
        "qwen2",
        QWEN2 | APART | sizes(3584, 18944, 28, 28) | {"vocab_size": 152064, "num_key_value_heads": 4},
        7.62,
    ),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": (
        "qwen2",
        QWEN2 | TIED | sizes(896, 4864, 24, 14) | {"vocab_size": 151936, "num_key_value_heads": 2},
        0.494,
    ),
    "openai/gpt-oss-20b": (
        "gpt_oss",
        sizes(2880, 2880, 24, 64) | {"vocab_size": 201088, "head_dim": 64, "num_key_value_heads": 8}
        | {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
        20.9,
    ),
    "google/gemma-3-12b-it": ("gemma3", GEMMA, 12.19),
}  # fmt: skip
"""{model: (model type, its config, billions of parameters)}."""
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
FEW_EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
}


def config_of(name: str) -> Any:
    kind, settings, _ = PUBLISHED[name]
    return AutoConfig.for_model(kind, **settings)


def small_config(name: str, vocab: int) -> Any:
    """The published config with other sizes: RoPE, norms, windows, ties and towers are those of the model."""
    kind, settings, _ = PUBLISHED[name]
    less = SMALL | {"vocab_size": vocab, "initializer_range": 0.25} | FEW_EXPERTS.get(kind, {})
    if kind != "gemma3":
        return AutoConfig.for_model(kind, **settings | less)
    text = settings["text_config"] | less | {"sliding_window": 8, "query_pre_attn_scalar": 16}
    vision = settings["vision_config"] | {"hidden_size": 32, "intermediate_size": 48}
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28}
    return AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=9
    )


# ---- tokenizers with the structure of each family's chats; the templates are ours ----


@dataclass(frozen=True)
class Talk:
    """How a family writes a chat."""

    special: tuple[str, ...]
    """The end of a turn comes first; the model may also end the text with the second."""
    bos: str | None
    template: str
    opening: str
    """What stands before the answer."""
    padding: int
    """Logits that no token has, as published models have some."""


HEADER = "<|start_header_id|>{role}<|end_header_id|>\n\n"
TALKS = {
    "llama": Talk(
        special=("<|eot_id|>", "<|end_of_text|>", "<|begin_of_text|>")
        + ("<|start_header_id|>", "<|end_header_id|>"),
        bos="<|begin_of_text|>",
        template=(
            "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
            "{{ m.content | trim }}<|eot_id|>{% endfor %}"
            "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
        ),
        opening=HEADER.format(role="assistant"),
        padding=0,
    ),
    "qwen3": Talk(
        special=("<|im_end|>", "<|endoftext|>", "<|im_start|>"),
        bos=None,
        # What was thought in earlier turns is not shown again.
        template=(
            "{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip() }}"
            "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n"
            "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
            "{% endif %}"
        ),
        opening="<|im_start|>assistant\n",
        padding=11,
    ),
    "gemma3": Talk(
        special=("<end_of_turn>", "<eos>", "<bos>", "<start_of_turn>"),
        bos="<bos>",
        # It knows no system role: what a system says opens the first turn. Roles must alternate.
        template=(
            "{{ bos_token }}{% set first = '' %}{% set turns = messages %}"
            "{% if messages[0].role == 'system' %}{% set first = messages[0].content ~ '\n\n' %}"
            "{% set turns = messages[1:] %}{% endif %}{% for m in turns %}"
            "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}"
            "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
            "{{ first if loop.first else '' }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
            "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
        ),
        opening="<start_of_turn>model\n",
        padding=63,
    ),
    "gpt_oss": Talk(
        special=("<|return|>", "<|call|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>"),
        bos=None,
        template=(
            "{% for m in messages %}<|start|>{{ m.role }}"
            "{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
            "<|message|>{{ m.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
        ),
        opening="<|start|>assistant",
        padding=5,
    ),
}
SPEAKS_LIKE = {"qwen3_moe": "qwen3", "qwen2": "qwen3"}
OPENS_WITH = {
    "qwen3": "<think>\nThey ask me something.\n</think>\n\n",
    "gpt_oss": "<|channel|>final<|message|>",
}
"""What the target writes before the answer itself."""
THINK = ("<think>", "</think>")
CHATS: list[list[tuple[str, str]]] = [
    [("user", "Name a colour."), ("assistant", "Blue, like the sky.")],
    [("system", "Be brief."), ("user", "What is 2 + 3?"), ("assistant", "It is 5.")],
    [("user", "Hi!"), ("assistant", "Hello, who are you?")]
    + [("user", "Ann — from Zürich."), ("assistant", "Grüezi, Ann!\nHow is the lake?")],
    [("user", "Count."), ("assistant", "1\n2\n3\n4\n5\n6\n7\n8\n9\n10")],
    [("user", "Write code."), ("assistant", "def f(x):\n    return x + 1")],
    [("user", "One more colour."), ("assistant", "Red, like the roofs of the old town.")],
]


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """A BPE of a few hundred tokens: with bytes for letters, or spaces written ▁ as Gemma's."""
    talk = TALKS[kind]
    spaced = kind == "gemma3"
    tokenizer = Tokenizer(models.BPE(byte_fallback=spaced, unk_token="<unk>" if spaced else None))
    special = [*talk.special, *(["<unk>"] if spaced else [])]
    if spaced:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        alphabet: list[str] = []
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 256 + 60, special_tokens=special, initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([text for talks in CHATS for _, text in talks], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=talk.special[0], bos_token=talk.bos,
        additional_special_tokens=list(talk.special[1:]), chat_template=talk.template,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    if kind == "qwen3":  # ordinary tokens there, not special ones: they are shown
        fast.add_tokens([AddedToken(word, special=False, normalized=False) for word in THINK])
    return fast


def spoken(talks: list[tuple[str, str]], kind: str) -> tuple[list[dict[str, Any]], str]:
    """(messages up to the last answer, what the target says to them, its end of turn included)."""
    messages = [{"role": role, "content": text} for role, text in talks]
    answer = messages.pop()["content"]
    thoughts = OPENS_WITH.get(kind, "")
    if kind == "qwen3":
        for message in messages:
            if message["role"] == "assistant":
                message["content"] = thoughts + message["content"]
    return messages, thoughts + answer + TALKS[kind].special[0]


def rows_of(kind: str) -> list[sample_store.SampleRow]:
    """The chats as train/sample.py writes them when the target answers just that."""
    tokenizer, rows = tokenizer_of(kind), []
    for number, talks in enumerate(CHATS):
        messages, answer = spoken(talks, kind)
        prompt = Prompt(f"{number}#0", "chats", None, messages, 0)
        reply = tokenizer(answer, add_special_tokens=False)["input_ids"]
        script = Conversation([encode_prompt(ChatTemplate(tokenizer), prompt)], [reply])
        read = TokenizedPrompt(prompt.id, prompt.source, script.packed())
        rows.append(make_row(SampleConfig(), read, script, "eos"))
    return rows


def kind_of(name: str) -> str:
    kind = PUBLISHED[name][0]
    return SPEAKS_LIKE.get(kind, kind)


@cache
def saved_model(home: Path, name: str) -> Path:
    """A small random model of that kind with its tokenizer, as a folder."""
    kind = kind_of(name)
    tokenizer, talk = tokenizer_of(kind), TALKS[kind]
    torch.manual_seed(len(name))
    config = small_config(name, len(tokenizer) + talk.padding)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    folder = home / name.replace("/", "--")
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list(talk.special[:2]))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def recipe(file: str) -> DistillConfig:
    return parse_settings(DistillConfig, "", ["--config", str(RECIPES / file)])


FILES = sorted(path.name for path in RECIPES.glob("*.yaml"))


def test_every_recipe_is_for_a_model_that_is_known_here() -> None:
    """Catches a recipe that nothing below tries, and a folder that became empty."""
    assert len(FILES) >= 6
    for file in FILES:
        s = recipe(file)
        assert s.target in PUBLISHED, f"{file}: give {s.target} an entry in PUBLISHED"
        assert s.draft.init in ("", *PUBLISHED), f"{file}: give {s.draft.init} an entry too"
    assert {path.suffix for path in RECIPES.iterdir()} == {".yaml"}


# ---- what is learned ----


@pytest.mark.parametrize("kind", TALKS)
def test_what_is_learned_is_the_answer_with_its_end(kind: str) -> None:
    """Catches a template's opening among what is learned, an end of turn or thoughts that are not, and two BOS."""
    tokenizer, talk = tokenizer_of(kind), TALKS[kind]
    for row, talks in zip(rows_of(kind), CHATS, strict=True):
        batch = batching.collate([row], pad_id=0)
        at = batch.loss_mask[0].nonzero()[:, 0]
        learned = tokenizer.decode(batch.input_ids[0, at + 1])
        messages, answer = spoken(talks, kind)
        assert learned == answer
        assert learned.endswith(talk.special[0])
        assert (at + 1).tolist() == list(range(*row["loss_spans"][0]))
        before = tokenizer.decode(batch.input_ids[0, : at[0] + 1])
        assert before.endswith(talk.opening)
        assert "<think>" not in before  # of earlier turns
        assert messages[-1]["content"] in before
        if talk.bos is not None:
            assert before.count(talk.bos) == 1
            assert before.startswith(talk.bos)
    refused = [{"role": "user", "content": "a"}] * 2
    if kind == "gemma3":
        with pytest.raises(UserError, match="roles"):
            ChatTemplate(tokenizer).encode(refused)


# ---- every recipe runs ----


def world_of(home: Path, file: str) -> tuple[Path, Path, list[object]]:
    """(target, samples, overrides that shrink the recipe)."""
    s = recipe(file)
    target = saved_model(home, s.target)
    data = home / f"samples-{kind_of(s.target)}"
    if not data.exists():
        rows = rows_of(kind_of(s.target))
        sample_store.write_shard(data, rows[:4], "a")
        sample_store.write_shard(data, rows[4:], "b")
        settings = SampleConfig(target=str(target), out=str(data))
        counts = {"asked": 6, "answered": 6, "failed": 0}
        answering.write_manifest(settings, answering.load_reader(settings), counts)
    less: list[object] = ["--target", target, "--data", data, "--loop.steps", 2]
    less += ["--loop.batch_size", 4, "--loop.micro_batch", 2, "--loop.warmup", 1]
    less += ["--loop.save_every", 2, "--loop.eval_every", 2, "--check.prompts", 1]
    less += ["--check.max_new_tokens", 4, "--check.k", 2, "--mixed_precision", "bf16"]
    if s.draft.continues:
        less += ["--draft.init", saved_model(home, s.draft.continues)]
    if s.draft.family == "eagle3":
        less += ["--draft.vocab", 96, "--draft.steps", 3]
    if layers := vars(s.draft).get("taps"):  # as many of the small model's
        less += ["--draft.taps", list(range(1, len(layers) + 1))]
    return target, data, less


def distill(file: str, *more: object) -> worlds.Done:
    return worlds.call("train/distill.py", "--config", RECIPES / file, *more)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_a_recipe_runs_and_its_draft_decodes(file: str, home: Path, tmp_path: Path) -> None:
    """Catches settings, taps, RoPE, windows, ties, padded vocabularies or multimodal configs that break on the way.
    The dry run comes first and must leave nothing; then the run itself, its draft loaded anew, and greedy text with it
    equal to transformers' own."""
    s = recipe(file)
    name, _, less = world_of(home, file)
    out = tmp_path / "out"
    done = distill(file, *less, "--out", out, "--dry_run", "true").ok()
    assert list(tmp_path.iterdir()) == []
    tried = json.loads(done.out.splitlines()[-1])
    check_dry_run(tried, done.err, s)

    distill(file, *less, "--out", out).ok()
    weights = load_file(out / "model.safetensors")
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())
    config = json.loads((out / "config.json").read_text())
    if s.draft.family == "eagle3":
        check_eagle_config(config, s.target)
        tokenizer = tokenizer_of(kind_of(s.target))
        ids = layouts.ids_from_d2t(weights["d2t"], config["vocab_size"])
        ends = tokenizer.convert_tokens_to_ids(list(TALKS[kind_of(s.target)].special[:2]))
        assert {*ends} <= {*ids.tolist()}  # a draft that cannot end a turn is always rejected there

    target = load_target(str(name), "cpu")
    plain = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    draft = load_draft(str(out), target)
    prompts = [target.chat.encode(text) for text in ("Name a colour.", "Hi!")]
    ends = sorted(target.eos)
    want = [hf_text(plain, ids, max_new_tokens=12, eos_token_id=ends) for ids in prompts]
    outputs = decode(target, draft, prompts, k=3, max_new_tokens=12)
    assert [output.output_ids for output in outputs] == want
    assert sum(drafted for output in outputs for drafted, _ in output.rounds) > 0


def check_dry_run(tried: dict[str, Any], text: str, s: DistillConfig) -> None:
    """Both tables are there, and what was estimated agrees with what was made."""
    assert "estimated, not measured" in text
    assert "memory, sum" in text
    assert "Nothing was kept" in text
    estimated, measured = tried["estimated"], tried["measured"]
    assert measured["seconds"] > 0
    assert measured["hours"] == pytest.approx(measured["seconds"] * 2 / 3600)
    assert measured["tokens_per_second"] > measured["learned_per_second"] > 0
    assert measured["peak_bytes"] > 1e7
    assert measured["accept/tau"] >= 1
    is_language_model = s.draft.family in ("causal", "pard")
    size = 4 if is_language_model else DTYPES[s.target_dtype].itemsize
    maps = 96 * 8 + 600 if s.draft.family == "eagle3" else 0
    files = 2e6 if is_language_model else 8e3  # config, and a small LM's tokenizer
    parameters = (estimated["trained"] + estimated["frozen"]) * size
    assert 0 <= measured["draft_bytes"] - parameters <= maps + files


def check_eagle_config(config: dict[str, Any], name: str) -> None:
    """RoPE and norms of the target went into the draft: of Gemma's two RoPEs the one of its full layers."""
    kind = PUBLISHED[name][0]
    theta = {"llama": 5e5, "qwen3": 1e6, "qwen3_moe": 1e7, "gemma3": 1e6, "gpt_oss": 1.5e5}[kind]
    scaled = {"llama": "llama3", "gemma3": "linear", "gpt_oss": "yarn"}.get(kind, "default")
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == theta
    assert config["rope_parameters"]["rope_type"] == scaled
    if scaled == "default":
        assert config["rope_scaling"] is None
    else:
        assert config["rope_scaling"]["factor"] == (32.0 if kind == "gpt_oss" else 8.0)
    assert config["rms_norm_eps"] == (1e-5 if kind in ("llama", "gpt_oss") else 1e-6)
    assert config["head_dim"] == 16
    assert config["draft_vocab_size"] == 96


def test_two_ropes_give_one_whatever_their_order() -> None:
    """Catches a draft whose RoPE hangs on how the target's config was written: the hub's has sliding layers first."""
    config = config_of("google/gemma-3-12b-it").get_text_config(decoder=True)
    ropes = config.rope_parameters
    assert list(ropes) == ["sliding_attention", "full_attention"]
    first = eagle_layouts.llama_layer_config(config, 8)
    config.rope_parameters = dict(reversed(ropes.items()))
    assert eagle_layouts.llama_layer_config(config, 8) == first
    assert first["rope_theta"] == 1e6


def test_a_model_answers_through_its_template(home: Path, tmp_path: Path) -> None:
    """Catches train/sample.py with its ready settings failing on a chat, or teaching what the target did not write."""
    name = saved_model(home, "google/gemma-3-12b-it")
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"messages": spoken(talks, "gemma3")[0]}) for talks in CHATS]
    prompts.write_text("\n".join(lines))
    out = tmp_path / "samples"
    worlds.call(
        "train/sample.py", "--config", worlds.ROOT / "configs" / "sample" / "chat.yaml",
        "--target", name, "--out", out, "--max_new_tokens", 8, "--dtype", "float32",
        "--sources", json.dumps([{"kind": "file", "path": str(prompts)}]),
    ).ok()  # fmt: skip
    tokenizer = tokenizer_of("gemma3")
    rows = sample_store.read_shards(out)
    assert len(rows) == len(CHATS)
    for row in rows:
        [[start, end]] = row["loss_spans"]
        assert tokenizer.decode(row["input_ids"][:start]).endswith(TALKS["gemma3"].opening)
        assert end == len(row["input_ids"]) <= start + 8


def test_a_dry_run_tells_of_trouble_in_one_line(home: Path, tmp_path: Path) -> None:
    """Catches a traceback where the rehearsal meets what it is for: no data, no such target."""
    file = "llama-3.1-8b-eagle3.yaml"
    _, _, less = world_of(home, file)
    for wrong, named in (("--data", "none"), ("--target", "missing/model/folder")):
        done = distill(file, *less, wrong, tmp_path / named, "--dry_run", "true")
        *before, last = done.err.splitlines()
        assert done.code == 2
        assert last.startswith("error: ")
        assert named in last
        # What a run is going to need is told without samples; without a target nothing is.
        assert any("none yet" in line for line in before) == (wrong == "--data")


# ---- estimates ----


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_size(name: str) -> None:
    """Guards the entries above: a wrong config would make every estimate wrong."""
    with torch.device("meta"):
        model = auto_class(config_of(name)).from_config(config_of(name))
    found = sum(p.numel() for p in model.parameters()) / 1e9
    assert found == pytest.approx(PUBLISHED[name][2], rel=0.01)


# ---- what recipes say of themselves ----


def forecast(file: str, tokens: int, learned: int) -> str:
    """The sentence that a recipe's comment has to hold."""
    s = recipe(file)
    load = StepWorkload(
        samples=s.loop.batch_size, tokens=tokens, supervised_tokens=learned,
        max_tokens=s.loop.max_length, max_supervised_tokens=s.loop.max_length,
        micro_batch=min(s.loop.micro_batch, s.loop.batch_size),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shape_run, "load_config", lambda name, what: config_of(name))
        run = ShapeRun(s, config_of(s.target))
    memory = sum(resources.memory_breakdown(run, load, mixed=True).values())
    disk = sum(resources.disk_breakdown(run, DTYPES[s.target_dtype].itemsize, s.loop.keep).values())
    flops = load.samples * resources.step_cost(run, load).flops
    time = s.loop.steps * flops / (SHARE * PEAK) / 3600
    return (
        f"{run.trained / 1e6:,.0f} M parameters trained, {format_bytes(memory)} on each GPU at most, "
        f"{format_bytes(disk)} on disk, {flops / 1e15:.2f} PFLOP a step, {time:,.0f} GPU hours."
    )


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_figures_in_comments_are_those_of_the_estimates(file: str) -> None:
    """Catches figures in a recipe that were right before somebody changed its settings."""
    said = comment(file)
    tokens, learned = assumed_samples(file)
    assert forecast(file, tokens, learned) in said


def comment(file: str) -> str:
    lines = (RECIPES / file).read_text().splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def assumed_samples(file: str) -> tuple[int, int]:
    """(tokens, labels) of the samples for which a recipe's comment gives figures."""
    assumed = re.search(r"samples of ([\d,]+) tokens, ([\d,]+) of them the target's", comment(file))
    assert assumed is not None, f"{file}: say what the estimates assume of samples"
    tokens, learned = (int(x.replace(",", "")) for x in assumed.groups())
    return tokens, learned


@pytest.mark.parametrize("file", FILES)
def test_comments_say_what_a_recipe_needs(file: str) -> None:
    """Catches a recipe that does not say how to sample for it, or what its figures assume."""
    said = comment(file)
    assert assumed_samples(file) > (0, 0)
    assert re.search(r"M parameters trained, [\d.]+ GB on each GPU at most", said)
    assert "Estimated, not measured" in said
    assert "35 % of 989 TFLOP/s" in said
    assert "--dry_run true" in said
    assert "train/sample.py --config configs/sample/chat.yaml" in said
    assert "command: train/distill.py" in said
    s = recipe(file)
    assert f"--target {s.target}" in said  # the sampling command asks the same model
    assert f"--out {s.data}" in said


def test_recipes_do_not_share_folders() -> None:
    """Catches two recipes that write to one folder, and samples of one target given to another."""
    found = [recipe(file) for file in FILES]
    assert len({s.out for s in found}) == len(found)
    targets = {s.data: {o.target for o in found if o.data == s.data} for s in found}
    assert all(len(names) == 1 for names in targets.values())
    for file in FILES:
        assert set(yaml.safe_load((RECIPES / file).read_text())) >= {
            "target", "data", "out", "loop",
        }  # fmt: skip


# ---- what others published ----

PUBLISHED_VALUES: list[dict[str, Any]] = yaml.safe_load(
    (worlds.ROOT / "docs" / "published.yaml").read_text()
)
MEANS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("learning_rate", "lr", "LR"), ("loop.lr", float)),
    **dict.fromkeys(("max_grad_norm", "grad_clip"), ("loop.clip", float)),
    **dict.fromkeys(
        ("max_length", "max_seq_length", "model_max_length", "max_len", "SEQ_LENGTH"),
        ("loop.max_length", int),
    ),
    "max_steps": ("loop.steps", int),
    "warmup_ratio": ("warmup share", float),
    "lr_scheduler_type": ("loop.min_lr", {"constant": 1.0}.__getitem__),
    "is_warmup": ("schedule", str),
    "global_batch_size": ("loop.batch_size", int),
    "loss_decay_gamma": ("weights.decay", lambda gamma: round(math.exp(-1 / gamma), 3)),
    "STEP_WEIGHT_BETA": ("weights.decay", float),
    **dict.fromkeys(("ttt_length", "num_speculative_steps"), ("draft.steps", int)),
    "draft_vocab_size": ("draft.vocab", int),
    # Outputs of layers there; the layer that the same states enter here.
    **dict.fromkeys(
        ("target_layer_ids", "eagle_aux_hidden_state_layer_ids"),
        ("draft.taps", lambda ids: [i + 1 for i in ids]),
    ),
    **dict.fromkeys(("num_hidden_layers", "num_draft_layers"), ("draft.depth", int)),
    **dict.fromkeys(("num_depths", "para_num"), ("draft.block", int)),
    **dict.fromkeys(("down_sample_ratio", "down_sample_ration"), ("draft.retention", float)),
    **dict.fromkeys(
        ("down_sample_ratio_min", "down_sample_ration_min"), ("draft.min_retention", float)
    ),
    "markov_rank": ("draft.markov_rank", int),
    "medusa_num_heads": ("draft.heads", int),
    "medusa_num_layers": ("draft.head_layers", int),
    "ce_loss_alpha": ("divergence.mix.hard_ce", float),
    # Σ |p - q| is twice TV, one of which is the loss itself.
    "l1_loss_alpha": ("divergence.mix.tv", lambda weight: round(2 * weight - 1, 3)),
}
"""{a name in a source: (ours, what makes its value ours)}."""


def leaves(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= leaves(value) if isinstance(value, dict) else {name: value}
    return found


def read_source(source: dict[str, Any]) -> dict[str, Any]:
    """{our name: value} of what we take from a source; KeyError for a name that nobody has given a meaning."""
    values = leaves(source["values"])
    if "num_warmup_steps" in values:
        values["warmup_ratio"] = values.pop("num_warmup_steps") / values.pop("total_steps")
    # DFlash counts the anchor, DSpark does not.
    if "block_size" in values:
        values["num_depths"] = values.pop("block_size") - (source["path"].endswith("dflash.json"))
    return {MEANS[k][0]: MEANS[k][1](v) for k, v in values.items() if k not in source["differs"]}


for one in PUBLISHED_VALUES:
    one.setdefault("differs", {})
    one.setdefault("families", [])


def sources_of(name: str, kind: str) -> list[dict[str, Any]]:
    return [source for source in PUBLISHED_VALUES if name in source[kind]]


def published(name: str, kind: str = "recipes") -> dict[str, Any]:
    return {k: v for source in sources_of(name, kind) for k, v in read_source(source).items()}


def value_of(s: DistillConfig, dotted: str) -> Any:
    if dotted == "warmup share":
        warmup = s.loop.warmup
        return warmup if warmup < 1 else pytest.approx(warmup / s.loop.steps, rel=0.06)
    value: Any = s
    for name in dotted.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def departures(s: DistillConfig, values: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{name: (ours, theirs)} of what is not as published."""
    ours = {name: value_of(s, name) for name in values}
    return {name: (ours[name], values[name]) for name in values if ours[name] != values[name]}


@pytest.mark.parametrize("file", FILES)
def test_values_are_the_published_ones(file: str) -> None:
    """Catches a recipe of values that its source does not have: the source's, not this test's."""
    name = file.removesuffix(".yaml")
    assert len(published(name)) >= 3, f"{file}: give its source in docs/published.yaml"
    assert departures(recipe(file), published(name)) == {}


def test_sources_say_where_they_are_and_what_differs() -> None:
    """Catches a source that cannot be looked up, what has no source, and a difference that is none any more."""
    for source in PUBLISHED_VALUES:
        assert re.fullmatch(r"[0-9a-f]{40}", source["commit"]), source["path"]
        assert source["recipes"] or source["families"]
        for name in source["differs"]:
            assert name in leaves(source["values"])
    (medusa,) = sources_of("qwen3-0.6b-medusa", "recipes")
    (mtp,) = sources_of("qwen3-8b-mtp", "recipes")
    for source, file in ((medusa, "qwen3-0.6b-medusa.yaml"), (mtp, "qwen3-8b-mtp.yaml")):
        assert departures(recipe(file), read_source(source | {"differs": {}})).keys() == {
            MEANS[name][0] for name in source["differs"]
        }
    named = {name for source in PUBLISHED_VALUES for name in source["families"]}
    assert named == {name for name in TRAINED_FAMILIES if not name.startswith("layerskip")}


def test_a_value_that_nobody_published_is_seen() -> None:
    """Catches a comparison that finds every recipe right: a rate and taps that others have, planted."""
    s = recipe("gpt-oss-20b-eagle3.yaml")
    s.loop.lr, s.draft.taps = 2e-4, [1, 11, 21]  # type: ignore[attr-defined]
    found = departures(s, published("gpt-oss-20b-eagle3"))
    assert found == {"loop.lr": (2e-4, 1e-4), "draft.taps": ([1, 11, 21], [2, 12, 22])}


def row(file: str) -> str:
    s = recipe(file)
    figures = re.search(
        r"([\d.]+) GB on each GPU at most, ([\d.]+) GB on disk, .* a step, ([\d,]+) GPU",
        comment(file),
    )
    assert figures is not None
    memory, disk, hours = figures.groups()
    cells = (f"[{file.removesuffix('.yaml')}](distill/{file})", s.target, s.draft.family)
    source = sources_of(file.removesuffix(".yaml"), "recipes")[0]
    origin = f"{source['repo']} {source['commit'][:7]}, {source['path']}"
    return f"| {' | '.join((*cells, hours, memory, disk, origin, 'not run'))} |"


def test_the_table_of_recipes_has_them_all() -> None:
    """Bug: a recipe that nobody finds, or a figure of earlier settings in the table."""
    page = (worlds.ROOT / "configs" / "README.md").read_text().splitlines()
    rows = [line for line in page if line.startswith("| [") and "](distill/" in line]
    assert sorted(rows) == sorted(map(row, FILES))


# ---- what a run is told by its family alone ----

CASES = {name: name for name in TRAINED_FAMILIES} | {"causal, new weights": "causal"}
OWN = ("depth", "block", "steps", "heads", "retention", "markov_rank")


def family_row(name: str) -> str:
    """The line of docs/families.md on how this family is trained by default."""
    words = ["--draft.family", CASES[name]]
    if "new" in name:
        words += ["--draft.init_config", "{hidden_size: 512}"]
    s = parse_settings(DistillConfig, "", words)
    loop, values = s.loop, vars(s.draft)
    warmup = f"{loop.warmup:.3g} steps" if loop.warmup >= 1 else f"{100 * loop.warmup:g} %"
    losses = [s.loss, *(f"{weight:g} {other}" for other, weight in s.divergence.mix.items())]
    own = ", ".join(f"{key} {values[key]}" for key in OWN if key in values)
    cells = (
        name, f"{loop.lr:g}", warmup, f"{loop.min_lr:g}", f"{loop.clip:g}", f"{loop.max_length:,}",
    )  # fmt: skip
    cells += (" + ".join(losses), f"{s.weights.decay:g}", own, s.draft.training_defaults().source)
    return f"| {' | '.join(cells)} |"


def test_the_page_has_the_defaults_of_each_family() -> None:
    """Bug: a table of defaults that are not those in force."""
    page = (worlds.ROOT / "docs" / "families.md").read_text().splitlines()
    start = page.index("## What a family trains with by default")
    rows = [line for line in page[start:] if line.startswith("| ")]
    assert rows[1:] == [family_row(name) for name in CASES]


@pytest.mark.parametrize("name", [x for x in TRAINED_FAMILIES if not x.startswith("layerskip")])
def test_defaults_are_the_published_ones(name: str) -> None:
    """Catches --draft.family dspark with a rate, loss, size or length that its publication does not have."""
    words = ["--draft.family", name, *(["--draft.init", "small-lm"] if name == "causal" else [])]
    alone = parse_settings(DistillConfig, "", words)
    values = published(name, "families")
    # Layers, steps and batches are the target's and the data's.
    not_ours = {"draft.taps", "loop.steps", "loop.batch_size", "draft.vocab"}
    assert (
        departures(alone, {key: value for key, value in values.items() if key not in not_ours})
        == {}
    )


def test_what_is_given_stands_above_the_family() -> None:
    """Bug: a default of the family replaces what somebody typed, or what belongs to its own loss stays with another."""
    words = ["--draft.family", "dspark", "--loop.lr", "0.001", "--loss", "forward_kl"]
    s = parse_settings(DistillConfig, "", words)
    assert (s.loop.lr, s.loop.max_length, s.loss, s.divergence.mix) == (
        1e-3,
        4096,
        "forward_kl",
        {},
    )
    assert default_taps(36) == (2, 10, 18, 26, 34)
    assert default_taps(4) == (2,)


def test_answers_are_as_long_as_the_template_asks() -> None:
    """Bug: a thinking target is cut off in its thoughts, which are then all that a draft learns."""
    lengths = {}
    for kind in ("gemma3", "qwen3", "gpt_oss"):
        reader = SimpleNamespace(tokenizer=tokenizer_of(kind), template={})
        lengths[kind] = answering.usual_answer_length(cast(TargetTokenizer, reader))
    assert lengths == {"gemma3": 1024, "qwen3": 2048, "gpt_oss": 2048}
    off = SimpleNamespace(tokenizer=tokenizer_of("qwen3"), template={"enable_thinking": False})
    assert answering.usual_answer_length(cast(TargetTokenizer, off)) == 1024
