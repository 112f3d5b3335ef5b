"""PEFT adapters: merged once into a cached folder with the weights of their base, which is then loaded like any model.

The folder holds base and adapter in float32, merged by `peft` itself, so that all its methods and variants count; the
tokenizer's files of the adapter, or the base's where it has none; and `merged_adapter.json`, which says what they were
made from. Adapter files beside whole weights are what a merge left behind: they change nothing.
"""

import contextlib
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, hf_hub_download, list_repo_files, snapshot_download
from safetensors import safe_open
from torch import Tensor

from decode.common import damage
from decode.common.errors import UserError, disk_error, one_line
from decode.common.files import read_json_object, write_atomically
from decode.model.formats import tied_heads
from decode.model.formats.made_folders import copy_files, files_named, made_folder
from decode.model.names import cache_error, is_local

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
SOURCE_FILE = "merged_adapter.json"
"""Written last into a folder, so that a folder with it is whole."""
FULL_WEIGHTS = re.compile(
    r"(model|pytorch_model|medusa_lm_head)\b.*\.(safetensors|bin|index\.json)|.*\.gguf"
)
"""Names of files that hold a model of its own; adapters and the rests of a training have others."""
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
"""Patterns of the files of a tokenizer."""
BASE_FILES = ("generation_config.json", "*processor_config.json")
OTHER_TASKS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
"""peft's names of tasks whose models write no text."""
COMPUTED = ("vera_A", "vera_B")
"""Parts of tensor names that peft may compute anew instead of storing them."""
PREFIX = "base_model.model."
"""What peft puts before the names of a model's modules."""


@dataclass(frozen=True)
class Adapter:
    """The files of an adapter, in a folder of this disk."""

    what: str
    """Its role ("target", "draft") in messages."""
    name: str
    """As the user gave it."""
    folder: Path
    config: dict[str, Any]
    base: str
    """The model that it changes: a folder or Hub name."""
    revision: str | None
    """That of the base, on the Hub."""

    @property
    def kind(self) -> str:
        """peft's name of its method, such as LORA."""
        return str(self.config.get("peft_type"))

    def refusal(self, reason: str) -> UserError:
        """The error for an adapter that cannot be merged; `reason` says why and what to do."""
        return UserError(
            f"{self.what} {self.name!r} is an adapter ({self.kind}) of base {self.base!r}{reason}"
        )


def find_adapter(name: str, what: str, revision: str | None = None) -> Adapter | None:
    """The adapter that the folder or Hub name `name` means; None for what is no adapter or has whole weights.

    For the latter a line says, once, that its adapter files change nothing. `what` is the role ("target", "draft").
    UserError for adapters that are not in safetensors, name no base, or have no merged form.
    """
    listed = _local_listing(name) if is_local(name) else _hub_listing(name, revision)
    if listed is None:
        return None
    folder, files = listed
    if any(FULL_WEIGHTS.fullmatch(file) for file in files):
        damage.warn_once(f"{name!r} holds whole weights: the adapter files beside them are ignored")
        return None
    if WEIGHTS_FILE not in files:
        pickle = "adapter_model.bin" in files
        found = "its weights are a pickle (adapter_model.bin)" if pickle else "there are no weights"
        raise UserError(
            f"{what} {name!r} is an adapter without {WEIGHTS_FILE} ({found}): save it again as safetensors"
        )
    config = read_json_object(folder / CONFIG_FILE, "as peft writes it", ["peft_type"])
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base.strip():
        raise UserError(
            f"{what} {name!r} is an adapter that names no base: write the folder or Hub name of the model that it was "
            f"trained on into base_model_name_or_path of its {CONFIG_FILE}"
        )
    if not Path(base).exists() and (folder / base).exists():
        base = str((folder / base).resolve())
    asked = config.get("revision")
    adapter = Adapter(
        what, name, folder, config, base, asked if asked and not is_local(base) else None
    )
    if config.get("task_type") in OTHER_TASKS:
        raise adapter.refusal(f" for {config['task_type']}, which writes no text: take another")
    if config.get("megatron_config"):  # peft would import any module that the file names
        raise adapter.refusal(" made for Megatron, which is not read: merge it where it was made")
    return adapter


def _local_listing(name: str) -> tuple[Path, list[str]] | None:
    folder = Path(name)
    if not (folder / CONFIG_FILE).is_file():
        return None
    return folder, [file.name for file in folder.iterdir()]


@cache
def _hub_listing(name: str, revision: str | None) -> tuple[Path, list[str]] | None:
    """(folder, names of all files) of a repository with an adapter; the folder has those that are read here.

    None for others, and if there is no such repository or no network, which loading it will tell.
    """
    if name.endswith(".gguf"):
        return None
    try:
        folder = Path(hf_hub_download(name, CONFIG_FILE, revision=revision)).parent
    except Exception:  # any of a dozen kinds
        return None
    try:
        files = list(list_repo_files(name, revision=revision))
        if not any(FULL_WEIGHTS.fullmatch(file) for file in files):
            wanted = [CONFIG_FILE, WEIGHTS_FILE, *BASE_FILES, *TOKENIZER_FILES]
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except Exception:  # no network: what is in the Hub's cache is there
        files = [file.name for file in folder.iterdir()]
    return folder, files


def without_adapter(folder: str) -> str:
    """A cached folder of links to the files of `folder` without those of an adapter; `folder` itself if it has none, or
    is a name on the Hub.

    transformers adds an adapter that lies beside whole weights to them.
    """
    if not (Path(folder) / CONFIG_FILE).is_file():
        return folder
    source = Path(folder).resolve()
    digest = hashlib.sha256(str(source).encode()).hexdigest()
    links = Path(constants.HF_HOME) / "draftsmith" / "whole" / digest[:16]
    files = {file.name: file for file in source.iterdir() if not file.name.startswith("adapter_")}
    try:
        links.mkdir(parents=True, exist_ok=True)
        for link in links.iterdir():
            if link.name not in files:
                link.unlink(missing_ok=True)
        for name, file in files.items():
            with contextlib.suppress(FileExistsError):
                (links / name).symlink_to(file)
    except OSError as error:
        raise UserError(f"{folder!r} is linked in the cache: {cache_error(error)}") from error
    return str(links)


def merged_folder(
    adapter: Adapter, base_folder: str, config: Any, load_base: Callable[[], Any]
) -> Path:
    """The cached folder with base and adapter merged; made now unless it is there. A line names both, once.

    `base_folder` is what transformers loads as the base, a folder or Hub name, `config` the base's config; `load_base`
    gives the base in float32. UserError for a base whose weights stay quantised, and for an adapter that does not fit.
    """
    if hasattr(config, "quantization_config"):
        raise adapter.refusal(
            f", whose weights are quantised ({config.quantization_config.get('quant_method')}) and cannot take it: "
            f"write the name of the plain model into base_model_name_or_path of {CONFIG_FILE}"
        )
    own = {
        file.name: damage.sha256_once(file) for file in files_named(adapter.folder, [WEIGHTS_FILE])
    }
    own |= {
        str(file.relative_to(adapter.folder)): file.read_text()
        for file in files_named(adapter.folder, [CONFIG_FILE, *BASE_FILES, *TOKENIZER_FILES])
        if file.suffix != ".model"
    }
    content = [own, _identity(base_folder, config)]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    what = f"{adapter.what} {adapter.name!r}, an adapter,"
    save = partial(_save_merged, adapter, base_folder, config, load_base)
    made = made_folder("adapters", digest, SOURCE_FILE, what, save)
    damage.warn_once(
        f"{adapter.name!r} is an adapter ({adapter.kind}) of {adapter.base!r}: both are used, merged in {made}"
    )
    return made


def _save_merged(
    adapter: Adapter, base_folder: str, config: Any, load_base: Callable[[], Any], made: Path
) -> None:
    merge(adapter, load_base()).save_pretrained(made, safe_serialization=True)
    base_files = _local_copy(base_folder, config)
    has_tokenizer = any(files_named(adapter.folder, ["tokenizer.json", "tokenizer.model"]))
    tokenizer_files = adapter.folder if has_tokenizer else base_files
    sources = {base_files: BASE_FILES, adapter.folder: ("generation_config.json",)}
    for folder, patterns in [*sources.items(), (tokenizer_files, TOKENIZER_FILES)]:
        copy_files(files_named(folder, patterns), folder, made)
    note = {"adapter": adapter.name, "base": adapter.base, "peft_type": adapter.kind}
    write_atomically(made / SOURCE_FILE, json.dumps(note, indent=2) + "\n")


def merge(adapter: Adapter, base: Any) -> Any:
    """`base`, changed by the adapter. UserError unless all tensors of the adapter are used, and none is missing."""
    import peft  # heavy, and needed only here

    if adapter.config.get("layer_replication"):
        raise adapter.refusal(
            " that repeats layers: merge it with peft, and give the merged folder"
        )
    with safe_open(adapter.folder / WEIGHTS_FILE, "pt") as tensors:
        stored = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    tied = tied_heads.are_tied(base)
    try:
        with warnings.catch_warnings():  # what matters in them is tested here
            warnings.simplefilter("ignore")
            _take_stored_embedding(adapter, base, stored)
            # Peft changes matrices in place, and would change the one by the other's adapter
            if tied:
                head = base.get_output_embeddings()
                head.weight = torch.nn.Parameter(head.weight.detach().clone())
            matrices = [
                f"{PREFIX}{name}.{part}weight"
                for name in tied_heads.module_names(base)
                for part in ("", "base_layer.", "original_module.", "modules_to_save.")
            ]
            model = peft.PeftModel.from_pretrained(base, str(adapter.folder))
            if not hasattr(model, "merge_and_unload"):
                raise adapter.refusal(", of a kind that has no merged form: choose another adapter")
            held = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
            _check_all_used(adapter, held, stored, matrices)
            merged = model.merge_and_unload(safe_merge=True)
            embedding, head = merged.get_input_embeddings(), merged.get_output_embeddings()
            if tied and torch.equal(embedding.weight, head.weight):
                head.weight = embedding.weight
    except UserError:
        raise
    except Exception as error:  # a wrong base fails in any of a dozen ways
        refused = disk_error(error, adapter.folder)
        if refused is not None:
            raise adapter.refusal(f": {refused}") from error
        raise adapter.refusal(
            f", and the two cannot be merged ({one_line(error)}): if it was trained on another base, write that into "
            f"base_model_name_or_path of {CONFIG_FILE}"
        ) from error
    tied_heads.follow_tensors(merged)
    return merged


def _take_stored_embedding(adapter: Adapter, base: Any, stored: dict[str, Tensor]) -> None:
    """Gives `base` the embedding that an adapter stores whole, as it does after a change of the vocabulary's size, and
    so many rows in its head. UserError where the head's new rows are not stored."""
    names = tied_heads.module_names(base)
    parts = ("", "base_layer.")
    found = [
        [stored[key] for part in parts if (key := f"{PREFIX}{name}.{part}weight") in stored]
        for name in names
    ]
    matrix = next((matrices[0] for matrices in found if matrices), None)
    if matrix is None:
        return
    rows = len(base.get_input_embeddings().weight)
    if len(matrix) != rows:
        if not tied_heads.are_tied(base) and not all(found):
            raise adapter.refusal(
                f" for {len(matrix)} tokens instead of {rows}, and stores no LM head or no embedding for them: save it "
                "again with save_embedding_layers=True"
            )
        base.resize_token_embeddings(len(matrix), mean_resizing=False)
    kept = adapter.config.get("modules_to_save") or []
    if found[0] and not any(f".{names[0]}".endswith(f".{name}") for name in kept):
        base.get_input_embeddings().weight.data.copy_(found[0][0])


def _check_all_used(
    adapter: Adapter, held: dict[str, Tensor], stored: dict[str, Tensor], whole: Iterable[str]
) -> None:
    """UserError if the model, with `held` of the adapter, has no place for a tensor of its file, or lacks one in it."""
    surplus = sorted(stored.keys() - held.keys() - set(whole))
    absent = sorted(n for n in held.keys() - stored.keys() if not any(c in n for c in COMPUTED))
    if surplus or absent:
        reason = f"has no place for {surplus[0]}" if surplus else f"lacks {absent[0]} in it"
        raise adapter.refusal(
            f", which {reason} ({len(surplus + absent)} tensors in all): if it was trained on another base, write that "
            f"into base_model_name_or_path of {CONFIG_FILE}"
        )
    both = stored.keys() & held.keys()
    other = [n for n in both if not torch.equal(stored[n].float(), held[n].float())]
    if other:
        raise adapter.refusal(
            f", and peft reads other numbers than its file holds ({other[0]}): take another version of peft"
        )


def _local_copy(base: str, config: Any) -> Path:
    """A folder with the base's files beside its weights."""
    if Path(base).is_dir():
        return Path(base)
    commit = vars(config).get("_commit_hash")
    wanted = [*BASE_FILES, *TOKENIZER_FILES]
    return Path(snapshot_download(base, revision=commit, allow_patterns=wanted))


def _identity(base: str, config: Any) -> list[Any]:
    """What changes when the base does: its commit on the Hub, or the state of its files in a folder."""
    if not Path(base).is_dir():
        return [base, vars(config).get("_commit_hash")]
    wanted = ["config.json", "*.safetensors*", *BASE_FILES, *TOKENIZER_FILES]
    files = files_named(Path(base), wanted)
    return [[str(file.resolve()), *damage.file_state(file)] for file in files]
