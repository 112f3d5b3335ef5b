"""Models and tokenizers from a folder or the Hub, and the target with everything that belongs to it."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import logging

from decode.common import damage
from decode.common.chat.choice import TemplateSetting
from decode.common.chat.render import ChatTemplate, Trained
from decode.common.errors import UserError, disk_error
from decode.common.files import find_bundled, read_json_object
from decode.common.machine import return_freed_memory
from decode.common.target_record import ModelFingerprint, TargetRecord
from decode.common.typed_json import to_json
from decode.devices.choice import has_bfloat16, pick_device
from decode.model.compatibility import check_sizes
from decode.model.fingerprint import weights_fingerprint
from decode.model.formats import tied_heads
from decode.model.formats.adapters import (
    TOKENIZER_FILES,
    find_adapter,
    merged_folder,
    without_adapter,
)
from decode.model.formats.gguf_files import gguf_folder
from decode.model.formats.made_folders import copy_files, files_named
from decode.model.formats.quantized import (
    check_bare_numbers,
    check_whole_numbers,
    is_scattered,
    quantized_folder,
    stated_quantization,
    stored_scales,
)
from decode.model.layer_stack import decoder_config
from decode.model.names import cache_error, check_name, is_local, load_error, recorded_name
from decode.model.quantized.conversion import INT4_TARGET, KINDS, quantize_model, quantize_network
from decode.model.recurrent import RecurrentRunner, has_recurrent_layers
from decode.model.runner import ModelRunner
from decode.model.seq2seq import Seq2SeqRunner
from decode.model.vision import VisionRunner, is_vision_language
from decode.model.vocabularies import PROBE, disagreement

NO_CODE: dict[str, Any] = {"trust_remote_code": False}
"""Where it is not set, transformers asks on the terminal whether code from the model's folder shall run."""
NO_ADAPTER = {"subfolder": "no-adapter"}
"""Where transformers looks for an adapter of a model on the Hub: not beside the weights, to which it would add it."""
NUMBER_TYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16
}  # fmt: skip
DTYPES = NUMBER_TYPES | {
    "int8": torch.float32,
    "int8_bfloat16": torch.bfloat16,
    **dict.fromkeys(KINDS, torch.float32),
}
"""The values of `dtype` settings, and what is computed in but for products of linear layers: their weights have eight
bits (int8), their inputs as well (w8a8), or their weights have four (w4a8; int4, for drafts)."""
CHOICE_SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "typical_p", "guidance_scale"), 1.0),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), 1.0),
    **dict.fromkeys(("top_k", "min_p", "top_h", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "penalty_alpha"), 0),
    **dict.fromkeys(("min_length", "min_new_tokens", "diversity_penalty"), 0),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids")),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "sequence_bias", "stop_strings")),
    **dict.fromkeys(("force_words_ids", "constraints", "watermarking_config", "dola_layers")),
    **dict.fromkeys(("exponential_decay_length_penalty", "max_time", "max_length")),
    **dict.fromkeys(("max_new_tokens",)),
}
"""Settings of generation_config.json that choose tokens or their number, with the value that changes nothing."""


@dataclass(frozen=True)
class Target:
    """The model whose text is wanted faster, and its tokenizer."""

    runner: ModelRunner
    tokenizer: Any
    name: str
    """Folder or Hub name, as it was given; results call it by its `recorded_name`."""
    revision: str | None
    """Commit, tag or branch on the Hub."""
    fingerprint: str
    """That of its tokenizer (`tokenizer_fingerprint`)."""
    eos: frozenset[int]
    """Ids that end a text; empty when the model has none."""
    dtype: str | None = None
    """What is computed in: a key of DTYPES."""
    template: dict[str, Any] = field(default_factory=dict)
    """Which of its chat templates the tokenizer renders with, and the arguments; {}: its own."""

    @cached_property
    def chat(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.template)

    def with_template(
        self, setting: TemplateSetting | None, trained: Trained | None = None
    ) -> "Target":
        """The target that renders chats as `ChatTemplate.chosen` says."""
        chat = ChatTemplate.chosen(self.tokenizer, setting, trained)
        return replace(self, tokenizer=chat.tokenizer, template=chat.setting)

    @cached_property
    def identity(self) -> ModelFingerprint:
        """What it is, wherever its files lie; weights that came from no files are None."""
        folder = self.runner.model.config.name_or_path
        return model_fingerprint(folder, self.revision, self.dtype)

    @property
    def rendering_identity(self) -> ModelFingerprint:
        """What it is, with the chat template that renders its prompts."""
        return replace(self.identity, chat_template=self.chat.hash)

    def describe(self) -> TargetRecord:
        name, commit = recorded_name(self.name)
        named: dict[str, Any] = {"name": name, "revision": self.revision or commit}
        named |= {"tokenizer": self.fingerprint, "template": self.template or None}
        return TargetRecord(**named | to_json(self.identity))

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.runner.model.config.is_encoder_decoder)

    @cached_property
    def eos_ids(self) -> Tensor:
        """`eos` [E] in rising order, on the device of the model."""
        return torch.tensor(sorted(self.eos), dtype=torch.long, device=self.runner.device)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """16 hex digits, a hash of the vocabulary and the ids of a probe text: equal for tokenizers with the same ids."""
    content = [sorted(tokenizer.get_vocab().items()), tokenizer(PROBE)["input_ids"]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def model_folder(
    name: str, what: str, revision: str | None = None, dtype: torch.dtype | None = None
) -> str:
    """What transformers loads: `name` itself, or the cached folder of the GGUF, quantised checkpoint or adapter that it
    means.

    The folder of a GGUF has weights in `dtype`, and none where that is None: then only config and tokenizer are read.
    `what` is its role ("target", "draft") in the UserError for what is not there or is no model.
    """
    name = find_bundled(name)
    local = check_name(name, what, revision=revision)
    merged = adapter_folder(name, what, revision)
    if merged is not None:
        return merged
    name = gguf_folder(name, revision, dtype) or quantized_folder(name, revision) or name
    if local and not Path(name).is_dir():
        raise UserError(f"{what} {name!r} is a file: name the folder that holds config.json")
    if local and not (Path(name) / "config.json").is_file():
        raise UserError(f"{what} {name!r} holds no config.json: give a model folder or a hub name")
    return name


def adapter_folder(
    name: str, what: str, revision: str | None = None, above: Sequence[str] = ()
) -> str | None:
    """The cached folder with the adapter `name` and its base merged; None for what is no adapter.

    `above` are the adapters whose base this one is. UserError for a base that is not there, and for one that the
    adapter does not fit.
    """
    adapter = find_adapter(name, what, revision)
    if adapter is None:
        return None
    place = str(adapter.folder.resolve())
    if place in above:
        raise adapter.refusal(": adapters that are each other's base, name the model behind them")
    base, role = adapter.base, f"base of adapter {name!r},"
    try:
        local = is_local(base)
        merged = adapter_folder(base, role, adapter.revision, [*above, place]) if local else None
        folder = merged or model_folder(base, role, adapter.revision)
        config = load_config(base, role, adapter.revision, folder)
    except UserError as error:
        raise adapter.refusal(
            f", which cannot be read ({error}): get it, or write its folder or Hub name into base_model_name_or_path "
            "of adapter_config.json"
        ) from error
    load_base = partial(load_model, merged or base, role, "cpu", "float32", adapter.revision)
    return str(merged_folder(adapter, folder, config, load_base))


def model_fingerprint(
    folder: str, revision: str | None = None, dtype: str | None = None
) -> ModelFingerprint:
    """What `folder`, as `model_folder` gives it, is when it computes in `dtype`. Weights of no folder ("") are None."""
    with _quietly():
        return ModelFingerprint(
            weights_fingerprint(folder, revision) if folder else None, dtype, revision
        )


def load_config(
    name: str, what: str, revision: str | None = None, folder: str | None = None
) -> Any:
    """The config of a model in a folder or on the Hub, which says of embedding and LM head what the tensors do.

    `folder` is what `model_folder` gives for the name, where that is known. UserError when the config cannot be read or
    makes no sense.
    """
    folder = folder or model_folder(name, what, revision)
    config = stated_config(name, what, revision, folder)
    tied = stored_tied(config, folder)
    if tied is not None:
        if tied and not tied_heads.flag(config):
            damage.warn_once(
                f"{what} {name!r}: its config.json says that LM head and embedding are two matrices, and its files "
                "hold only the embedding, which is taken for both"
            )
        tied_heads.set_flag(config, tied)
    return config


def stated_config(
    name: str, what: str, revision: str | None = None, folder: str | None = None
) -> Any:
    """The config as its file states it, as `load_config` otherwise."""
    folder = folder or model_folder(name, what, revision)
    try:
        with _quietly():
            config = AutoConfig.from_pretrained(folder, revision=revision, **NO_CODE)
    except Exception as error:  # transformers raises a dozen kinds
        raise _load_error(name, what, folder, ("config.json",), error) from error
    check_sizes(config, f"{what} {name!r}")
    return config


def copy_tokenizer_files(name: str, out: Path) -> None:
    """Copies the tokenizer's files of a model into the folder `out`, unchanged."""
    folder = Path(model_folder(name, "model"))
    copy_files(files_named(folder, TOKENIZER_FILES), folder, out)


def head_is_misstated(folder: str, what: str) -> bool:
    """Whether the config.json of a local folder says another thing of embedding and LM head than its tensors.

    Engines that follow the file compute other logits than this project.
    """
    # The folder itself, of which no weight is dequantised.
    stated = stated_config(folder, what, folder=folder)
    tied = stored_tied(stated, folder)
    return tied is not None and tied != tied_heads.flag(stated)


def stored_tied(config: Any, folder: str) -> bool | None:
    """Whether the weights of a decoder hold one matrix for embedding and LM head; None where that cannot be told.

    That of a repository on the Hub can be told once its files are in the Hub's cache.
    """
    if config.is_encoder_decoder:
        return None
    try:
        pairs = auto_class(config)._model_mapping[type(config)]._tied_weights_keys
    except (KeyError, AttributeError):  # no model of this kind, or several: loading it will tell
        return None
    return tied_heads.stored_tied(_files_of(config, folder), pairs)


def _files_of(config: Any, folder: str) -> Path:
    """`folder`, or where the Hub's cache holds the files of the repository that it names."""
    if Path(folder).is_dir():
        return Path(folder)
    commit = vars(config).get("_commit_hash")
    cached = try_to_load_from_cache(folder, "config.json", revision=commit)
    return Path(cached).parent if isinstance(cached, str) else Path(folder)


def load_model(
    name: str,
    what: str,
    device: str,
    dtype: str,
    revision: str | None = None,
    with_layers: bool = True,
    place: Callable[..., tuple[Any, dict[str, Any]]] | None = None,
) -> Any:
    """A causal LM, encoder-decoder or vision-language model of transformers in eval mode.

    UserError when it is not there, damaged, or lacks weights. `what` is its role ("target", "draft") in error messages.
    Without its layers only the rest of the weights is read: embedding, final norm and LM head. `place` loads a model
    that is not on one device (decode/distributed): (config, description, folder, …) -> (model, loading information).
    """
    device, number_type = pick_device(device), find_dtype(dtype)
    if dtype == "int4" and what != "draft":
        raise UserError(f"{what} {name!r}: {INT4_TARGET}")
    folder = model_folder(name, what, revision, number_type)
    config = load_config(name, what, revision, folder)  # a senseless one may build for hours
    if vars(config).get("quantization_config") is None and Path(folder).is_dir():
        check_whole_numbers(Path(folder), name)
    pickles = _pickles(Path(folder))
    if pickles:
        raise _pickles_refused(name, what, pickles[0])
    if not with_layers:
        text = config.get_text_config(decoder=True)
        text.num_hidden_layers = 0
        if text.to_dict().get("layer_types"):
            text.layer_types = []
    try:
        files = without_adapter(folder)
        with _quietly():
            settings = {
                "dtype": number_type,
                "revision": revision,
                "use_safetensors": True,
                "adapter_kwargs": NO_ADAPTER,
                **NO_CODE,
            }
            if place is None:
                result: Any = auto_class(config).from_pretrained(
                    files, config=config, output_loading_info=True, **settings
                )
            else:
                result = place(config, f"{what} {name!r}", files, **settings)
    except UserError:
        raise
    except Exception as error:  # any of a dozen kinds, from HTTP to a truncated safetensors file
        looked_at = ("generation_config.json", "model.safetensors.index.json")
        raise _load_error(name, what, folder, looked_at, error) from error
    model, info = result
    model.config.name_or_path = folder
    if place is None:
        check_bare_numbers(model, _files_of(config, folder), f"{what} {name!r}")
    unused = sorted(info["unexpected_keys"])
    if unused and what == "draft":
        raise UserError(
            f"draft {name!r}: {unused[0]} and {len(unused) - 1} further tensors of its files are not part of the "
            f"{type(model).__name__} that its config.json describes, and of no layout of drafts that is read "
            "(docs/families.md): export it as such a draft"
        )
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if absent:  # transformers fills them at random and only warns
        raise UserError(
            f"{what} {name!r} lacks {len(absent)} weights ({absent[0]}, …): save it again in full"
        )
    if unused and with_layers:
        warnings.warn(
            f"{what} {name!r}: {len(unused)} tensors of its files are not part of the model that its config.json "
            f"describes and are not used ({unused[0]}, …)",
            stacklevel=2,
        )
    if place is None:
        model = model.to(device)
    tied_heads.follow_tensors(model)
    check_finite(model, f"{what} {name!r}", dtype)
    stored = stored_scales(folder, name) if dtype == "w8a8" else {}
    quantize_model(model, dtype, f"{what} {name!r}", stored, is_scattered(folder))
    return model


def place_network(network: Any, device: str, dtype: str) -> Any:
    """The network of a draft's head on `device`, in what `dtype` computes in, with the linear layers of that dtype.

    UserError for layers that are for CPUs alone.
    """
    network = network.to(device, DTYPES[dtype])
    quantize_network(network, dtype)
    return network


def auto_class(config: Any) -> Any:
    """The class of transformers that builds a model of this config: causal, with an encoder, or with a vision part."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    return AutoModelForImageTextToText if is_vision_language(config) else AutoModelForCausalLM


def check_finite(model: Any, what: str, dtype: str) -> None:
    """UserError for weights that are not finite, in the files or after their conversion to `dtype`.

    Of a model that is split over processes each looks at its part; weights on disk are not read.
    """
    parts = [
        (n, p.to_local() if isinstance(p, DTensor) else p) for n, p in model.named_parameters()
    ]
    named = [(n, p) for n, p in parts if p.is_floating_point() and p.numel() > 0 and not p.is_meta]
    bounds = [torch.stack(torch.aminmax(p.detach())).isfinite().all() for _, p in named]
    finite = torch.stack(bounds).tolist() if bounds else []
    bad = [name for (name, _), fine in zip(named, finite, strict=True) if not fine]
    if bad:
        raise UserError(
            f"{what}: {len(bad)} of its weights hold NaN or infinity in {dtype} ({bad[0]}, …): get the files again, "
            "or choose another dtype"
        )


def _pickles(folder: Path) -> list[str]:
    """The pickled weights in a local folder that has no safetensors."""
    if any(folder.glob("*.safetensors")):
        return []
    return sorted(f.name for end in ("bin", "pt", "pth") for f in folder.glob(f"*model*.{end}"))


def _pickles_refused(name: str, what: str, pickle: str) -> UserError:
    convert = "; ".join(
        f"t.{kind}.from_pretrained(n).save_pretrained('OUT')"
        for kind in ("AutoModelForCausalLM", "AutoTokenizer")
    )
    return UserError(
        f"{what} {name!r} holds its weights in {pickle}, and only safetensors are read: pickles may run code. Where "
        f"you trust it, convert it: python -c \"import transformers as t; n='FOLDER'; {convert}\""
    )


def _load_error(
    name: str, what: str, folder: str, files: Sequence[str], error: Exception
) -> UserError:
    """The UserError for `error`: what a disk refused, else what is wrong with the first bad one of the JSON `files` in
    a local `folder`, else the reason that the library gives."""
    refused = cache_error(error) or disk_error(error, folder)
    if refused:
        return UserError(f"{what} {name!r} cannot be loaded: {refused}")
    for path in (Path(folder) / file for file in files):
        if path.is_file():
            try:
                read_json_object(path, f"a {path.name}")
            except UserError as reason:
                return UserError(f"{what} {name!r} cannot be loaded: {reason}")
    if "does not appear to have" in str(error) and "safetensors" in str(error):  # on the Hub
        return _pickles_refused(name, what, "pickles (.bin)")
    if "ignore_mismatched_sizes" in str(error):
        return UserError(
            f"{what} {name!r} has weights of other shapes than its config.json says: restore its files"
        )
    q = stated_quantization(folder) if Path(folder).is_dir() else None
    advice = ": restore its files" if Path(name).is_dir() else ""
    if q is not None:
        advice = (
            f": its weights are quantised by {q['quant_method']!r}, which is left to transformers"
        )
    return UserError(
        f"{what} {name!r} cannot be loaded ({load_error(name, 'model', error)}){advice}"
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """In the block transformers prints no tables about loading: what matters in them becomes a line of ours."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """The tokenizer in a folder or on the Hub. UserError when it cannot be loaded."""
    folder = model_folder(name, "tokenizer", revision)
    try:
        with _quietly():
            return AutoTokenizer.from_pretrained(folder, revision=revision, **NO_CODE)
    except Exception as error:
        files = (
            "config.json",
            "tokenizer_config.json",
            "tokenizer.json",
            "special_tokens_map.json",
        )
        raise _load_error(name, "tokenizer of", folder, files, error) from error


def adopt_tokenizer(name: str, tokenizer: str, revision: str | None = None) -> None:
    """From here on the GGUF `name` has the tokenizer of the folder or Hub name `tokenizer`; "" changes nothing.

    UserError for another target than a GGUF, and for a tokenizer with other tokens.
    """
    if not tokenizer:
        return
    check_name(name, "target", revision=revision)
    own = load_tokenizer(tokenizer)
    folder = gguf_folder(name, revision, tokenizer=own)
    if folder is None:
        raise UserError(
            f"tokenizer {tokenizer!r} is of no use: {name!r} is no GGUF and has its own; leave it out"
        )
    if tokenizer_fingerprint(load_tokenizer(folder)) != tokenizer_fingerprint(own):
        raise UserError(
            f"tokenizer {tokenizer!r}: {name!r} was converted before, with other ids than this one's: leave it out, or "
            f"delete {folder}*, and it is converted again"
        )


def compare_tokenizers(
    fingerprint: str, model: Any, revision: Any, tokenizer: Any, whose: str = "the draft"
) -> tuple[str | None, Any]:
    """(the id that the tokenizer with that fingerprint and this one give to different tokens, in words; the former).

    The words are None if vocabularies extend each other (`disagreement`). Where `model`, which had it, cannot
    be read or has another one by now, only equal ones are one: then they are "", and the tokenizer is None.
    """
    try:
        own = load_tokenizer(str(model), None if revision is None else str(revision))
    except UserError:
        return "", None
    if tokenizer_fingerprint(own) != fingerprint:
        return "", None
    return disagreement(own, tokenizer, whose), own


def check_tokenizer_size(tokenizer: Any, vocab_size: int, name: str) -> None:
    """UserError when words of the tokenizer have ids for which the model has no embedding.

    Tokens that were added to the vocabulary may have such ids (some text models have one for images): they occur in
    no text.
    """
    added = tokenizer.get_added_vocab()
    ids = [number for token, number in tokenizer.get_vocab().items() if token not in added]
    if not ids or max(ids) >= vocab_size:
        raise UserError(
            f"target {name!r}: its tokenizer has {len(ids)} tokens with ids up to {max(ids, default=0)}, but the model "
            f"embeds {vocab_size}: restore the tokenizer.json that belongs to it"
        )


def end_ids(name: str, config: Any, revision: str | None = None) -> list[int]:
    """The ids that end a text of the model with this `config`, which `load_target` finds as well; needs no weights.

    UserError when generation_config.json cannot be read.
    """
    made = _read_generation_config(name, revision)
    return _as_list((config if made is None else made).eos_token_id)


def unfollowed_settings(
    name: str, revision: str | None, followed: Mapping[str, Any]
) -> dict[str, Any]:
    """What generation_config.json of a model says about the choice or the number of tokens, without what changes
    neither and what `followed` says as well: decoding here follows its own settings alone.

    UserError when it cannot be read.
    """
    made = _read_generation_config(name, revision)
    said: dict[str, Any] = {} if made is None else made.to_diff_dict()
    return {
        key: said[key]
        for key, neutral in CHOICE_SETTINGS.items()
        if key in said and said[key] not in (None, [], neutral, followed.get(key))
    }


def _read_generation_config(name: str, revision: str | None) -> GenerationConfig | None:
    """What a folder or a Hub repository holds; None: a model may have none."""
    folder = model_folder(name, "target", revision)
    try:
        return GenerationConfig.from_pretrained(folder, revision=revision or "main")
    except Exception as error:
        if isinstance(error, OSError) and not (Path(folder) / "generation_config.json").exists():
            return None
        raise _load_error(name, "target", folder, ("generation_config.json",), error) from error


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


def find_dtype(name: str) -> torch.dtype:
    """The dtype that is computed in. UserError for an unknown name."""
    if name not in DTYPES:
        raise UserError(f"dtype {name!r}: choose among {', '.join(DTYPES)}")
    return DTYPES[name]


def usual_dtype(name: str, device: str, revision: str | None = None) -> str:
    """What a target computes in where nobody says it: float32 on a CPU, on a GPU the dtype of its files, but float16
    where that is bfloat16 and only emulated. A GGUF names none, and gets bfloat16."""
    if not pick_device(device).startswith("cuda"):
        return "float32"
    config = load_config(name, "target", revision)
    stored = config.get_text_config(decoder=True).dtype or config.dtype or torch.bfloat16
    if stored == torch.bfloat16 and not has_bfloat16():
        stored = torch.float16
    return next((x for x, kind in NUMBER_TYPES.items() if kind == stored), "float32")


def _eos_ids(model: Any, name: str) -> frozenset[int]:
    """The ids that end a text. UserError for one that is no id of the model's vocabulary."""
    ids = _as_list(model.generation_config.eos_token_id)
    size = model.get_input_embeddings().weight.shape[0]
    bad = [one for one in ids if not isinstance(one, int) or not 0 <= one < size]
    if bad:
        raise UserError(
            f"target {name!r}: eos_token_id {bad[0]!r} of its generation_config.json is no id of its {size} tokens: "
            "correct it"
        )
    return frozenset(ids)


def load_target(
    name: str,
    device: str = "auto",
    dtype: str = "float32",
    revision: str | None = None,
    with_layers: bool = True,
    runner: ModelRunner | None = None,
) -> Target:
    """The target `name` (folder or Hub name), ready to decode. UserError when it cannot be loaded or decoded.

    Without its layers it cannot decode: it has the embedding, the final norm and the LM head, and `decoder.config`
    describes the whole model. That is for training where a server computes its hidden states. `runner` is the runner
    of a model that is loaded already, in another way (decode/distributed).
    """
    loaded = None if runner is None else runner.model
    model = loaded or load_model(name, "target", device, dtype, revision, with_layers)
    tokenizer = load_tokenizer(name, revision)
    check_tokenizer_size(tokenizer, model.get_input_embeddings().weight.shape[0], name)
    runner = runner or build_runner(model)
    if not with_layers:
        runner.config = load_config(name, "target", revision).get_text_config(decoder=True)
    return Target(
        runner=runner,
        tokenizer=tokenizer,
        name=name,
        revision=vars(model.config).get("_commit_hash") or revision,
        fingerprint=tokenizer_fingerprint(tokenizer),
        eos=_eos_ids(model, name),
        dtype=dtype,
    )


def build_runner(
    model: Any, vocab_size: int | None = None, ids: Tensor | None = None
) -> ModelRunner:
    """The runner of a causal LM, with recurrent layers or without, of an encoder-decoder or of a vision-language model;
    the arguments are those of ModelRunner."""
    kind: type[ModelRunner] = ModelRunner
    if model.config.is_encoder_decoder:
        kind = Seq2SeqRunner
    elif is_vision_language(model.config):
        kind = VisionRunner
    elif has_recurrent_layers(decoder_config(model)):
        kind = RecurrentRunner
    runner = kind(model, vocab_size, ids)
    return_freed_memory()  # of weights that others took the place of, here and in load_model
    return runner
