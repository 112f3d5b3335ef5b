"""Tiny random vision-language models, prompts with images for them, and what transformers' own code answers."""

import copy
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    CLIPImageProcessor,
    LlavaProcessor,
)

from decode.engine import image_prompts
from decode.model.loading import Target, build_runner
from decode.model.vision import image_token
from tests import worlds
from tests.seq2seq import letter_tokenizer
from tests.tiny import VOCAB
from tests.worlds import CONTEXT

IMAGE = 90
"""The placeholder of one image token."""
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "initializer_range": 0.25, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
WINDOWED = TEXT | {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,  # as many as the text has: counting layers does not tell them apart
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PATCHES: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "num_heads": 2,
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92}


def mrope(*section: int, **more: Any) -> dict[str, Any]:
    """A text config whose positions are those of time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **more}
    return TEXT | {"rope_parameters": rope}


def of_type(kind: str, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A part's config with its model type."""
    return settings | {"model_type": kind} | more


CLIP = of_type("clip_vision_model", VISION, projection_dim=16)
SIGLIP = of_type("siglip_vision_model", VISION)
LLAMA, QWEN2 = of_type("llama", TEXT), of_type("qwen2", TEXT)
COHERE2 = of_type("cohere2", WINDOWED)
SMALL = {"alignment_intermediate_size": 32, "downsample_factor": 2}


@dataclass(frozen=True)
class Variant:
    """A model type, and an image as its processor would give it."""

    settings: dict[str, Any]
    tokens: int
    """Placeholders of one image."""
    image: dict[str, tuple[int, ...] | list[Any]]
    """Shapes of the random numbers, or the values, that an image has in each input."""
    kinds: str = ""
    """The input that says which tokens belong to images, if there is one."""


def square(*shape: int) -> dict[str, tuple[int, ...] | list[Any]]:
    """One image of 28 x 28 pixels."""
    return {"pixel_values": (*shape, 3, 28, 28)}


GRID = {"pixel_values": (32, 96), "image_grid_thw": [[1, 4, 8]]}
"""32 patches, 2 x 4 tokens: their positions end 4 behind where the image begins, not 8."""
TILED = square(1, 2) | {"image_sizes": [[28, 28]]}

VARIANTS: dict[str, Variant] = {
    "qwen2_vl": Variant(
        QWEN
        | {"text_config": mrope(1, 1, 2)}
        | {"vision_config": PATCHES | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}},
        8, GRID, "mm_token_type_ids",
    ),
    "qwen2_5_vl": Variant(
        QWEN
        | {"text_config": mrope(1, 1, 2)}
        | {"vision_config": PATCHES | {"window_size": 16, "fullatt_block_indexes": [1]}},
        8, GRID, "mm_token_type_ids",
    ),
    "qwen3_vl": Variant(
        QWEN
        | {"text_config": mrope(2, 1, 1, mrope_interleaved=True)}
        | {"vision_config": PATCHES | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}},
        8, GRID, "mm_token_type_ids",
    ),
    "glm4v": Variant(
        {"image_token_id": IMAGE, "video_token_id": 91}
        | {"text_config": mrope(1, 1, 0, partial_rotary_factor=0.5)}
        | {"vision_config": PATCHES | {"image_size": 16}},
        8, GRID, "mm_token_type_ids",
    ),
    "gemma3": Variant(
        {"text_config": WINDOWED | {"query_pre_attn_scalar": 8}, "vision_config": VISION}
        | {"tie_word_embeddings": False}
        | {"image_token_id": IMAGE, "mm_tokens_per_image": 4},
        4, square(1), "token_type_ids",
    ),
    "gemma4": Variant(
        {
            "text_config": TEXT
            | {"sliding_window": 8, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 4}
            | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
            | {"global_head_dim": 16, "vocab_size_per_layer_input": VOCAB, "pad_token_id": 0},
            "vision_config": VISION
            | {"head_dim": 8, "num_key_value_heads": 2, "global_head_dim": 8}
            | {"position_embedding_size": 16, "pooling_kernel_size": 2, "default_output_length": 4},
            "image_token_id": IMAGE,
            "audio_config": None,
            "tie_word_embeddings": False,
        },
        4,
        {
            "pixel_values": (1, 16, 3 * 14 * 14),
            "image_position_ids": [[[x, y] for y in range(4) for x in range(4)]],
        },
        "mm_token_type_ids",
    ),
    "llama4": Variant(
        {
            "text_config": TEXT
            | {"intermediate_size_mlp": 48, "num_local_experts": 4, "interleave_moe_layer_step": 1}
            | {"attention_chunk_size": 48, "floor_scale": 64, "no_rope_layers": [1, 0, 1]},
            "vision_config": VISION
            | {"intermediate_size": 64, "vision_output_dim": 32}
            | {"projector_input_dim": 32, "projector_output_dim": 32, "pixel_shuffle_ratio": 0.5},
            "image_token_index": IMAGE,
        },
        1, square(1),
    ),
    "llava": Variant({"text_config": LLAMA, "vision_config": CLIP, "image_token_index": IMAGE}, 4, square(1)),
    "llava_next": Variant(
        {"text_config": LLAMA, "vision_config": CLIP, "image_token_index": IMAGE}
        | {"image_grid_pinpoints": [[28, 28]]},
        10, TILED,
    ),
    "llava_onevision": Variant(
        {"text_config": QWEN2, "vision_config": SIGLIP, "image_token_index": IMAGE}
        | {"image_grid_pinpoints": [[28, 28]], "video_token_index": 91},
        10, TILED,
    ),
    "vipllava": Variant(
        {"text_config": LLAMA, "vision_config": CLIP, "image_token_index": IMAGE}
        | {"vision_feature_layers": [-1, -2]},
        4, square(1),
    ),
    "mistral3": Variant(
        {"text_config": of_type("mistral", TEXT), "image_token_index": IMAGE}
        | {"vision_config": of_type("pixtral", VISION, head_dim=8), "spatial_merge_size": 1},
        4, square(1) | {"image_sizes": [[28, 28]]},
    ),
    "idefics3": Variant(
        {"text_config": LLAMA, "vision_config": of_type("idefics3_vision", VISION)}
        | {"image_token_id": IMAGE, "scale_factor": 2},
        1, square(1, 1),
    ),
    "smolvlm": Variant(
        {"text_config": LLAMA, "vision_config": of_type("smolvlm_vision", VISION)}
        | {"image_token_id": IMAGE, "scale_factor": 2},
        1, square(1, 1),
    ),
    "internvl": Variant(
        {"text_config": QWEN2, "image_token_id": IMAGE}
        | {"vision_config": VISION | {"image_size": [28, 28], "patch_size": [14, 14]}},
        1, square(1),
    ),
    "aya_vision": Variant(
        SMALL | {"text_config": COHERE2, "vision_config": SIGLIP, "image_token_index": IMAGE},
        1, square(1),
    ),
    "cohere2_vision": Variant(
        SMALL | {"text_config": COHERE2, "vision_config": SIGLIP, "image_token_id": IMAGE},
        1, square(1),
    ),
}  # fmt: skip


def vision_model(kind: str, seed: int = 0, std: float = 0.25, **text: Any) -> Any:
    """A random vision-language model in eval mode, whose text depends on its images; `text` changes its text config."""
    settings = copy.deepcopy(VARIANTS[kind].settings)
    settings["text_config"] |= text
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(kind, **settings)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "norm" not in name and "ln" not in name:
                    torch.nn.init.normal_(value, std=std)
    if kind == "llama4" and transformers.__version__ == "5.24.0":
        pytest.skip("this version of transformers cannot run its own llama4")
    return model.eval()


def vision_target(model: Any) -> Target:
    """A target over a copy of the model, without EOS."""
    return Target(build_runner(copy.deepcopy(model)), None, "tiny", None, "f", frozenset())


@dataclass(frozen=True)
class Prompt:
    """Token ids with the placeholders of an image, and the inputs of that image; None: text alone."""

    ids: list[int]
    images: dict[str, torch.Tensor] | None


def image_prompt(kind: str, before: int, after: int, seed: int = 0) -> Prompt:
    """`before` and `after` random tokens around the placeholders of a random image."""
    variant = VARIANTS[kind]
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.randint(0, IMAGE, (count,), generator=generator).tolist() for count in (before, after)
    )
    ids = [*left, *[IMAGE] * variant.tokens, *right]
    inputs = {
        name: torch.tensor(value)
        if isinstance(value, list)
        else torch.randn(value, generator=generator)
        for name, value in variant.image.items()
    }
    if variant.kinds:
        inputs[variant.kinds] = (torch.tensor([ids]) == IMAGE).long()
    return Prompt(ids, inputs)


def text_prompt(count: int, seed: int = 0) -> Prompt:
    """`count` random tokens of text."""
    generator = torch.Generator().manual_seed(seed)
    return Prompt(torch.randint(0, IMAGE, (count,), generator=generator).tolist(), None)


def generated(model: Any, prompt: Prompt, tokens: int) -> list[int]:
    """The greedy answer of transformers' `generate`, with its own attention and cache."""
    ids = torch.tensor([prompt.ids])
    out = copy.deepcopy(model).generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
        max_new_tokens=tokens, eos_token_id=None, pad_token_id=0, **(prompt.images or {}),
    )  # fmt: skip
    answer: list[int] = out[0, len(ids[0]) :].tolist()
    return answer


# ---- from files ----


TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def llava_folder(folder: Path) -> Path:
    """A LLaVA with its processor in `folder`, which also holds red.png and blue.png."""
    tokenizer = letter_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    text = LLAMA | {"vocab_size": len(tokenizer), "eos_token_id": 1}
    settings = VARIANTS["llava"].settings | {"text_config": text}
    token = tokenizer.convert_tokens_to_ids("<image>")
    config = AutoConfig.for_model("llava", **(settings | {"image_token_index": token}))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(value, std=0.25)
    model.save_pretrained(folder)
    pixels = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(
        pixels, tokenizer, patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    for color in ("red", "blue"):
        Image.new("RGB", (40, 30), color).save(folder / f"{color}.png")
    return folder


class PictureProcessor:
    """Reads pictures and texts of bytes for a tiny model of any kind: as many numbers and placeholders as it takes, and
    for the same picture the same. Processors of transformers need torchvision for some kinds."""

    chat_template = "of parts"
    image_processor = True

    def __init__(self, kind: str, tokenizer: Any, placeholder: int):
        self.variant, self.tokenizer, self.placeholder = VARIANTS[kind], tokenizer, placeholder

    def apply_chat_template(
        self, messages: list[dict[str, Any]], **settings: Any
    ) -> dict[str, torch.Tensor]:
        ids: list[int] = []
        found: dict[str, list[torch.Tensor]] = {}
        for part in (part for message in messages for part in message["content"]):
            if part["type"] == "text":
                ids += self.tokenizer(part["text"])["input_ids"]
                continue
            ids += [self.placeholder] * self.variant.tokens
            generator = torch.Generator().manual_seed(zlib.crc32(part["image"].tobytes()))
            for name, value in self.variant.image.items():
                made = (
                    torch.tensor(value)
                    if isinstance(value, list)
                    else torch.randn(value, generator=generator)
                )
                found.setdefault(name, []).append(made)
        # As templates do: `generate` gives wrong M-RoPE positions to what follows a prompt that ends with an image.
        ids += self.tokenizer(">")["input_ids"]
        inputs = {name: torch.cat(values) for name, values in found.items()}
        row = torch.tensor([ids])
        if self.variant.kinds:
            inputs[self.variant.kinds] = (row == self.placeholder).long()
        return {"input_ids": row, "attention_mask": torch.ones_like(row)} | inputs


# ---- pictures in rows ----

COLORS = ("red", "blue", "green")
load_processor = image_prompts.load_processor


def processor_of(name: str, revision: str | None = None) -> Any:
    """The processor of a tiny target: LLaVA's own, for other kinds one of these tests."""
    config = AutoConfig.from_pretrained(name)
    if config.model_type == "llava":
        return load_processor(name, revision)
    tokenizer = AutoTokenizer.from_pretrained(name)
    return PictureProcessor(config.model_type, tokenizer, image_token(config))


def save_target(folder: Path, kind: str) -> Path:
    """A tiny target of bytes; its placeholder is a token of its own."""
    tokenizer = worlds.byte_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT}
    model = vision_model(kind, seed=1, **size)
    model.config.image_token_id = len(tokenizer) - 1
    return worlds.save(folder, model, tokenizer)


def save_pictures(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for color in COLORS:
        Image.new("RGB", (40, 30), color).save(folder / f"{color}.png")
    return folder


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*content]}


def shown(path: str) -> dict[str, str]:
    return {"type": "image", "image": path}


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def own_inputs(target: Path, ids: Sequence[int], images: Sequence[Image.Image]) -> dict[str, Any]:
    """What the target's processor makes of `images`, each input of tokens being of all `ids`."""
    config = AutoConfig.from_pretrained(target)
    content = [{"type": "image", "image": one} for one in images]
    found = processor_of(str(target)).apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True,
        return_dict=True, return_tensors="pt",
    )  # fmt: skip
    kinds = torch.tensor([[int(token == image_token(config)) for token in ids]])
    return {
        name: kinds if "type_ids" in name else value
        for name, value in found.items()
        if name not in ("input_ids", "attention_mask")
    }
