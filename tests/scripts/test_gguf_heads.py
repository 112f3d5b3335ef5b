"""Heads as GGUF files: what is in them, what is refused, and, where llama-server is built, what it makes of them."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from decode.checkpoints import block_layouts, eagle_layouts, layouts
from decode.checkpoints.draft_folder import METADATA_FILE
from decode.common.errors import UserError
from decode.drafts.dflash_model import DFlashModel
from decode.drafts.eagle_model import Eagle3Model, llama_config
from decode.engine.engine import decode
from decode.model.formats.gguf_reader import GgufContent, StoredTensor, read_file
from decode.model.hidden_states import HiddenStateSpec, LMHead
from decode.model.loading import Target, load_target
from decode.serving import gguf_heads
from decode.serving import llamacpp_engine as llamacpp
from decode.serving.checker import check_draft_files
from decode.serving.rules import REFUSED, SILENT, DraftFiles, TargetInfo
from eval.served.parity import load_prompts
from eval.settings.evaluation import Task
from eval.settings.served import LlamaCppParityConfig
from scripts import export, llamacpp_parity
from tests.heads import randomise
from tests.scripts.test_check_blocks import good as block_drafts  # noqa: F401  a fixture
from tests.tiny import tiny_model
from tests.train.families.test_heads_training import row
from tests.worlds import ROOT
from train.data import batching
from train.families.base import FamilyContext
from train.families.builders import build_trainable
from train.families.settings.base import FamilySettings
from train.families.settings.blocks import DFlashSettings, DSparkSettings
from train.families.settings.eagle import Eagle3Settings
from train.settings.training import LossWeights
from train.trainer.settings import DistillConfig

TARGET = str(ROOT / "assets" / "target")
V, WIDTH, LAYERS = 4096, 256, 12
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def own() -> Target:
    return load_target(TARGET, "cpu")


def save_heads(folder: Path, own: Target, family: str, **changes: Any) -> Path:
    """Random heads for the bundled target, as training saves them; `changes` go into config.json."""
    config, size = own.runner.config, int(changes.pop("draft_vocab_size", V))
    ids = None if size == V else torch.arange(0, V, V // size)[:size] + 1
    taps, norms = changes.pop("taps", (2, 6, 9)), changes.pop("norms", ())
    net: Any
    if family == "eagle3":
        width = changes.pop("width", 0)
        fields = eagle_layouts.eagle3_config(config, V, size, taps, width, norms) | changes
        net = Eagle3Model(llama_config(fields), HiddenStateSpec(taps), ids)
    else:
        rank = 24 if family == "dspark" else 0
        fields = block_layouts.dflash_config(config, V, size, taps, 2, 5, 7, rank) | changes
        net = DFlashModel(
            llama_config(fields), HiddenStateSpec(taps), ids, LMHead(own.runner.model)
        )
    layouts.save_heads(folder, fields, randomise(net, 0), torch.bfloat16, ids)
    facts = {"family": family, "tokenizer_hash": own.fingerprint, "norms": list(norms)}
    (folder / METADATA_FILE).write_text(json.dumps(facts | {"target": {"name": TARGET}}))
    return folder


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3, reduced": ("eagle3", {"draft_vocab_size": 60}),
    "eagle3, whole": ("eagle3", {}),
    "eagle3, narrow": ("eagle3", {"width": 128, "draft_vocab_size": 60}),
    "eagle3, other layers": ("eagle3", {"taps": (0, 5, 11)}),
    "eagle3, norms": ("eagle3", {"norms": ("norm_before_residual", "norm_before_fc")}),
    "eagle3, llama3": ("eagle3", {"rope_parameters": LLAMA3, "rope_scaling": None}),
    "eagle3, fewer keys": ("eagle3", {"num_key_value_heads": 2, "rope_theta": 5e4, "rope_parameters": None}),
    "dflash, reduced": ("dflash", {"draft_vocab_size": 60, "taps": (1, 4, 7, 10)}),
    "dflash, whole": ("dflash", {"taps": (3,)}),
    "dflash, linear": ("dflash", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "dspark, reduced": ("dspark", {"draft_vocab_size": 60}),
    "dspark, whole": ("dspark", {"num_key_value_heads": 1}),
    "dspark, not from the anchor": ("dspark", {"sample_from_anchor": False}),
}  # fmt: skip


def exported(draft: Path, out: Path, **changes: Any) -> GgufContent:
    """What scripts/export.py writes for the draft."""
    settings: dict[str, Any] = {"draft": str(draft), "format": "gguf", "out": str(out)}
    export.main(export.ExportConfig(**(settings | changes)))
    assert [file.name for file in out.iterdir()] == ["model.gguf"]
    return read_file(out / "model.gguf")


def values(tensor: StoredTensor) -> torch.Tensor:
    """A tensor of the file, integers too."""
    if tensor.kind.name == "I64":
        found = np.fromfile(tensor.file, "<i8", tensor.shape[0], offset=tensor.offset)
        return torch.from_numpy(found)
    rows = tensor.rows(0, int(np.prod(tensor.shape[:-1])) if len(tensor.shape) > 1 else 1)
    return torch.from_numpy(rows.copy()).reshape(tensor.shape)


def in_pairs(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of queries or keys in which places i and i + size/2 of a head are neighbours."""
    rows = []
    for head in range(0, len(weight), size):
        for i in range(size // 2):
            rows += [weight[head + i], weight[head + i + size // 2]]
    return torch.stack(rows)


def expected_tensors(draft: Path, family: str) -> dict[str, torch.Tensor]:
    """What the GGUF must hold, from the saved files alone."""
    stored = load_file(draft / "model.safetensors")
    held = {k: v.float() if v.is_floating_point() else v for k, v in stored.items()}
    config = json.loads((draft / "config.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for i in range(config["num_hidden_layers"]):
        own = "midlayer" if family == "eagle3" else f"layers.{i}"
        names = {
            "attn_norm": "input_layernorm", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
            "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
        }  # fmt: skip
        if family == "eagle3":
            names["attn_norm_2"] = "hidden_norm"
        else:
            names |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
        for gguf, ours in names.items():
            found[f"blk.{i}.{gguf}.weight"] = held.pop(f"{own}.{ours}.weight")
    if family == "eagle3":
        for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
            found[name] = in_pairs(found[name], config["head_dim"])
    names = {"fc": "fc", "output_norm": "norm", "output": "lm_head", "token_embd": "embed_tokens"}
    names["enc.output_norm"] = "input_norm" if family == "eagle3" else "hidden_norm"
    names |= {"markov_w1": "markov_head.markov_w1", "markov_w2": "markov_head.markov_w2"}
    names["conf_proj"] = "confidence_head.proj"
    for gguf, ours in names.items():
        for kind in ("weight", "bias"):
            if f"{ours}.{kind}" in held:
                found[f"{gguf}.{kind}"] = held.pop(f"{ours}.{kind}")
    if "d2t" in held:
        ids = held.pop("t2d").nonzero()[:, 0]
        assert torch.equal(held.pop("d2t") + torch.arange(len(ids)), ids)
        found["d2t"] = ids
    assert not held
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_every_key_and_tensor_is_the_heads(name: str, own: Target, tmp_path: Path) -> None:
    """Catches a lost, renamed, reordered or rounded tensor, offsets where ids belong, ids of the other convention, and
    a size, flag, block or mask token that is another than the head's."""
    family, changes = VARIANTS[name]
    draft = save_heads(tmp_path / "draft", own, family, **changes)
    content = exported(draft, tmp_path / "out")
    wanted = expected_tensors(draft, family)
    config = json.loads((draft / "config.json").read_text())
    rope = config["rope_parameters"] or {"rope_theta": config["rope_theta"]}
    tensors = dict(content.tensors)
    if "rope_type" in rope and rope["rope_type"] != "default":
        divisors = values(tensors.pop("rope_freqs.weight"))
        waves = 2 * np.pi * 10000.0 ** (torch.arange(0, 64, 2) / 64)
        if rope["rope_type"] == "linear":
            assert torch.equal(divisors, torch.full((32,), 2.0))
        else:  # waves longer than the old context are stretched whole, those below a quarter of it not at all
            assert torch.allclose(divisors[waves > 64], torch.tensor(4.0))
            assert torch.allclose(divisors[waves < 16], torch.tensor(1.0))
            assert bool((divisors[1:] >= divisors[:-1] - 1e-6).all())
    assert tensors.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(values(tensors[key]), value), key
        assert tensors[key].kind.name == ("I64" if key == "d2t" else "F32")

    arch = "eagle3" if family == "eagle3" else "dflash"
    taps = list(changes.get("taps", (2, 6, 9)))
    keys = {
        "general.architecture": arch,
        f"{arch}.block_count": 1 if family == "eagle3" else 2,
        f"{arch}.context_length": 512,
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": 64,
        f"{arch}.attention.value_length": 64,
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.dimension_count": 64,
        f"{arch}.rope.freq_base": rope["rope_theta"],
        f"{arch}.vocab_size": V,
        f"{arch}.target_layers": taps,
    }
    if family == "eagle3":
        norms = changes.get("norms", ())
        keys |= {f"eagle3.{n}": n in norms for n in ("norm_before_residual", "norm_before_fc")}
        keys["eagle3.target_hidden_size"] = WIDTH
    else:
        keys |= {"dflash.block_size": 5, "dflash.attention.causal": False}
        assert content.keys["tokenizer.ggml.mask_token_id"] == 7
    if family == "dspark":
        anchor = changes.get("sample_from_anchor", True)
        keys |= {"dflash.has_confidence_head": True, "dflash.sample_from_anchor": anchor}
    own_keys = {k: v for k, v in content.keys.items() if k.startswith(("general.arch", f"{arch}."))}
    assert own_keys == keys
    tokens = own.tokenizer.convert_ids_to_tokens(list(range(V)))
    assert content.keys["tokenizer.ggml.tokens"] == tokens
    assert content.keys["tokenizer.ggml.eos_token_id"] in own.eos


def test_a_head_without_a_matrix_takes_the_targets(own: Target, tmp_path: Path) -> None:
    """Catches zeros of an outline in a file whose head is the target's own."""
    draft = save_heads(tmp_path / "draft", own, "eagle3")
    tensors = load_file(draft / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    layouts.write_checkpoint(draft, json.loads((draft / "config.json").read_text()), tensors)
    assert "output.weight" not in exported(draft, tmp_path / "out").tensors
    embedding = own.runner.model.get_input_embeddings().weight.detach().clone()
    copies = tensors | {"lm_head.weight": head, "embed_tokens.weight": embedding}
    layouts.write_checkpoint(draft, json.loads((draft / "config.json").read_text()), copies)
    found = exported(draft, tmp_path / "copies").tensors
    assert torch.equal(values(found["output.weight"]), head.float())
    assert "token_embd.weight" not in found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matrices_are_rounded_and_vectors_are_not(dtype: Any, own: Target, tmp_path: Path) -> None:
    draft = save_heads(tmp_path / "draft", own, "dspark", draft_vocab_size=60)
    wanted = expected_tensors(draft, "dspark")
    kinds = {1: "F32", 2: {"float16": "F16", "bfloat16": "BF16"}[dtype]}
    for name, tensor in exported(draft, tmp_path / "out", dtype=dtype).tensors.items():
        assert tensor.kind.name == ("I64" if name == "d2t" else kinds[len(tensor.shape)]), name
        value = wanted[name]
        rounded = value.to(getattr(torch, dtype)).float() if value.ndim > 1 else value
        assert torch.equal(values(tensor), rounded), name


def test_positions_of_four_sections_are_one_in_text(own: Target) -> None:
    """Catches a DFlash draft of a target with M-RoPE whose positions llama.cpp would read otherwise."""
    fields = block_layouts.dflash_config(own.runner.config, V, V, (3,), 2, 5, 7, 0)
    head = LMHead(own.runner.model)
    net = DFlashModel(llama_config(fields), HiddenStateSpec((3,)), None, head)
    sections = {"rope_parameters": {"mrope_section": [8, 12, 12]}}
    keys = gguf_heads.head_keys("dflash", net, sections)
    assert keys["rope.dimension_sections"] == [32, 0, 0, 0]
    assert "rope.dimension_sections" not in gguf_heads.head_keys("dflash", net, {})


# ---- what is refused ----

REFUSALS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "norm_output": ("eagle3", {"norms": ("norm_output",)}, SILENT, "has no norm_output"),
    "fc_norm": ("eagle3", {"norms": ("fc_norm",)}, REFUSED, "no tensor for fc_norm.0.weight"),
    "two states": ("eagle3", {"taps": (2, 6)}, REFUSED, "fc reads 2 hidden states"),
    "four states": ("eagle3", {"taps": (1, 2, 6, 9)}, REFUSED, "fc reads 4 hidden states"),
    "relu": ("eagle3", {"hidden_act": "relu"}, SILENT, "activation is relu"),
    "a window": ("eagle3", {"sliding_window": 128}, SILENT, "sliding_window is 128"),
    "YaRN": (
        "eagle3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, "rope_scaling": None},
        SILENT,
        "RoPE is of type yarn",
    ),
    "the anchor": ("dflash", {"sample_from_anchor": True}, SILENT, "sample_from_anchor is true"),
    "gelu": ("dspark", {"hidden_act": "gelu"}, SILENT, "activation is gelu"),
}  # fmt: skip


def refused(draft: Path, out: Path, **changes: Any) -> str:
    """The line with which the export ends, of which nothing may be left."""
    with pytest.raises(UserError) as ended:
        exported(draft, out, **changes)
    assert not out.exists()
    assert "\n" not in str(ended.value)
    return str(ended.value)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_gguf_cannot_say_is_refused(name: str, own: Target, tmp_path: Path) -> None:
    """Catches a file that loads in llama.cpp and computes something else than was trained."""
    family, changes, effect, words = REFUSALS[name]
    draft = save_heads(tmp_path / "draft", own, family, **changes)
    assert words in refused(draft, tmp_path / "out")
    found = check_draft_files(str(draft), "llamacpp", target=TARGET)
    assert [(f.effect, words in f.what) for f in found if f.source != "decode"][:1] == [(effect, True)]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "words"),
    [("peagle", "no P-EAGLE"), ("pard", "no parallel drafting"), ("mtp", "part of its target's")],
)
def test_families_that_llamacpp_does_not_have_are_refused(
    family: str,
    words: str,
    block_drafts: dict[str, Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    """Catches P-EAGLE written as EAGLE-3, which would load."""
    assert words in refused(block_drafts[family], tmp_path / "out", target=TARGET)


def test_a_target_that_hands_out_no_states_is_refused(own: Target, tmp_path: Path) -> None:
    """Catches a file with which llama-server starts, says that it is ready, and aborts at the first request."""
    draft = save_heads(tmp_path / "draft", own, "eagle3")
    folder = tmp_path / "qwen2"
    tiny_model("qwen2", vocab_size=V, hidden_size=WIDTH, num_hidden_layers=LAYERS).save_pretrained(folder)  # fmt: skip
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(TARGET) / file, folder / file)
    line = refused(draft, tmp_path / "out", target=str(folder))
    assert "no hidden states of targets of type qwen2: llama-server starts and aborts" in line
    found = check_draft_files(str(draft), "llamacpp", target=str(folder))
    assert (found[0].rule, found[0].effect) == ("target-states", REFUSED)


STATES = ("llama", "mistral", "qwen3", "qwen3_moe", "qwen3_5_text", "gpt_oss", "gemma4_text")
NO_STATES = ("qwen2", "gemma2", "gemma3_text", "mistral3", "phi3", "olmo2", "granite", "smollm3")


@pytest.mark.parametrize(
    ("kind", "served"), [*((k, True) for k in STATES), *((k, False) for k in NO_STATES)]
)
def test_targets_are_told_apart(kind: str, served: bool) -> None:
    """Catches a target that was left out of the list, or taken for its family's next one."""
    target = TargetInfo("t", {"model_type": kind}, None)
    files = DraftFiles("d", "eagle3", {}, {}, {}, {}, {}, target)
    assert (list(llamacpp.no_hidden_states(files)) == []) == served


def test_the_targets_name_is_needed(own: Target, tmp_path: Path) -> None:
    draft = save_heads(tmp_path / "draft", own, "eagle3")
    (draft / METADATA_FILE).write_text(json.dumps({"family": "eagle3", "norms": []}))
    assert "give --target" in refused(draft, tmp_path / "out")


# ---- in llama.cpp ----

SERVER = os.environ.get("LLAMA_SERVER", "") or shutil.which("llama-server")
served_only = pytest.mark.skipif(not SERVER, reason="LLAMA_SERVER and $PATH have no llama-server")
FITTED: dict[str, FamilySettings] = {
    "eagle3": Eagle3Settings(steps=3, vocab=400),
    "eagle3, norms": Eagle3Settings(steps=3, vocab=0, norms=["norm_before_residual", "norm_before_fc"]),
    "eagle3, narrow": Eagle3Settings(steps=3, vocab=400, width=128, taps=[1, 5, 10]),
    "dflash": DFlashSettings(depth=2, block=3, vocab=400, anchors=1.0, taps=[1, 4, 7, 10]),
    "dspark": DSparkSettings(depth=2, block=4, vocab=400, anchors=1.0, taps=[2, 6, 9], markov_rank=32),
}  # fmt: skip
"""Drafts of at least 3 tokens in a round."""
STEPS = {"eagle3": 12, "dflash": 28, "dspark": 26}
"""So many that about half of the drafts are accepted: heads that know the texts by heart accept them from any file."""
TASKS = [Task("code", limit=4)]
TOKENS = 24


@pytest.fixture(scope="module")
def fitted(own: Target, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Heads that have seen, for some seconds, the very answers on which they are compared."""
    home, made = tmp_path_factory.mktemp("fitted"), dict[str, Path]()
    prompts = [item.prompt_ids for item in load_prompts(TASKS, 4, own)]
    answers = decode(own, None, prompts, max_new_tokens=TOKENS + 6, rows=1)
    texts = [
        row([*prompt, *answer.output_ids], (len(prompt), len(prompt) + len(answer.output_ids)))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]

    def make(name: str) -> Path:
        if name in made:
            return made[name]
        settings = DistillConfig(draft=FITTED[name], weights=LossWeights(divergence=1.0), loss="hard_ce")  # fmt: skip
        torch.manual_seed(0)
        trainee = build_trainable(settings.draft, FamilyContext(settings, own, texts))
        with torch.no_grad():  # norms that are all ones could be exchanged unseen
            for key, value in trainee.model.named_parameters():
                if "norm" in key:
                    value.add_(0.3 * torch.randn_like(value))
        trained = [value for value in trainee.model.parameters() if value.requires_grad]
        optimizer, batch = torch.optim.AdamW(trained, lr=3e-3), batching.collate(texts, 0, 1)
        for _ in range(STEPS[settings.draft.family]):
            (trainee.loss(trainee.model, batch)["loss"] / (4 * TOKENS)).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        made[name] = home / name.replace(", ", "-")
        trainee.save(made[name])
        facts = {"family": settings.draft.family, "tokenizer_hash": own.fingerprint}
        facts |= {"norms": settings.draft.norms}
        (made[name] / METADATA_FILE).write_text(json.dumps(facts))
        return made[name]

    return make


def compared(draft: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """(exit code, result) of the comparison."""
    code = 0
    try:
        llamacpp_parity.main(
            LlamaCppParityConfig(
                draft=str(draft), target=TARGET, server=str(SERVER), tasks=TASKS, k=3, max_new_tokens=TOKENS, margin=0.0
            )
        )  # fmt: skip
    except SystemExit as end:
        code = int(str(end.code))
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
@served_only
@pytest.mark.parametrize("name", FITTED)
def test_llamacpp_accepts_what_we_accept(
    name: str, fitted: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a GGUF that loads and drafts something else, which equal texts would not show."""
    code, result = compared(fitted(name), capsys)
    assert (code, result["same"], result["prompts"]) == (0, 4, 4), result["differ"]
    totals = result["totals"]
    assert totals["ours"] == totals["llamacpp"]
    assert totals["ours"]["by_position"][2] > 0
    assert totals["ours"]["accepted"] < totals["ours"]["drafted"]


Tensors, Keys = dict[str, Any], dict[str, Any]


def swap(a: str, b: str) -> Callable[[Keys, Tensors], None]:
    return lambda keys, tensors: tensors.update({a: tensors[b], b: tensors[a]})


def shift_layers(by: int) -> Callable[[Keys, Tensors], None]:
    return lambda keys, tensors: keys.update(target_layers=[i + by for i in keys["target_layers"]])


def in_other_order(keys: Keys, tensors: Tensors) -> None:
    """Queries and keys of EAGLE-3 as transformers has them; of DFlash in pairs."""
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
        array = tensors[name]
        shape = (-1, 32, 2) if "blk.0.attn_norm_2.weight" in tensors else (-1, 2, 32)
        turned = array.reshape(*shape, array.shape[-1]).swapaxes(1, 2)
        tensors[name] = np.ascontiguousarray(turned.reshape(array.shape))


def offsets(keys: Keys, tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] - np.arange(len(tensors["d2t"]))


WRONG: dict[str, tuple[str, Callable[[Keys, Tensors], Any]]] = {
    "layers + 1": ("eagle3", shift_layers(1)),
    "layers - 1": ("eagle3", shift_layers(-1)),
    "swapped norms": ("eagle3", swap("blk.0.attn_norm.weight", "blk.0.attn_norm_2.weight")),
    "offsets for ids": ("eagle3", offsets),
    "another order of rows": ("eagle3", in_other_order),
    "a flag unsaid": ("eagle3, norms", lambda keys, tensors: keys.pop("norm_before_residual")),
    "layers - 1, DFlash": ("dflash", shift_layers(-1)),
    "another mask token": ("dflash", lambda keys, tensors: keys.update(mask_token=11)),
    "a shorter block": ("dflash", lambda keys, tensors: keys.update(block_size=3)),
    "causal blocks": ("dflash", lambda keys, tensors: keys.update({"attention.causal": True})),
    "offsets for ids, DFlash": ("dflash", offsets),
    "another order of rows, DFlash": ("dflash", in_other_order),
    "swapped norms, DSpark": ("dspark", swap("enc.output_norm.weight", "output_norm.weight")),
    "not from the anchor": ("dspark", lambda keys, tensors: keys.update(sample_from_anchor=False)),
    "no correction": ("dspark", lambda keys, tensors: tensors["markov_w2.weight"].fill(0)),
}
"""(heads, what is done to the keys and tensors of their file): all of them load."""


@pytest.mark.slow
@served_only
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_found(
    name: str, fitted: Callable[[str], Path], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Catches a comparison that passes for a file that llama.cpp loads and misreads."""
    heads, change = WRONG[name]
    right = gguf_heads.head_content

    def wrong(draft: str, target: str) -> Any:
        family, net, keys, tensors = right(draft, target)
        changed = {**keys, "mask_token": vars(net).get("mask_token")}
        tensors = {key: np.array(value) for key, value in tensors.items()}
        change(changed, tensors)
        net.mask_token = changed.pop("mask_token")
        return family, net, changed, tensors

    monkeypatch.setattr(gguf_heads, "head_content", wrong)
    code, result = compared(fitted(heads), capsys)
    assert code == 1
    assert len(result["differ"]) > 0
