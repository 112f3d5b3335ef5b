"""Adapters of peft as models: merged with their base as W + scale · B A says, and never added to whole weights."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from decode.checkpoints.draft_folder import draft_sha256
from decode.common import damage
from decode.common.errors import UserError
from decode.drafts.registry import draft_family, load_draft
from decode.engine.engine import decode
from decode.model.formats import adapters
from decode.model.loading import load_config, load_model, load_target, load_tokenizer, model_folder
from tests.params import rotated
from tests.quantized import FORMS
from tests.tiny import tiny_model
from tests.worlds import byte_tokenizer

VOCAB = 268  # of the byte tokenizer
IDS = torch.arange(12, 52).view(2, 20)
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and every line is said again."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    damage.warn_once.cache_clear()
    adapters._hub_listing.cache_clear()
    return tmp_path / "cache" / "draftsmith" / "adapters"


def write_base(folder: Path, arch: str = "llama", tokenizer: bool = True, **changes: Any) -> Path:
    model = tiny_model(arch, **({"vocab_size": VOCAB, "num_hidden_layers": 2} | changes))
    model.save_pretrained(folder)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder


def lora(**changes: Any) -> LoraConfig:
    settings: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
    }
    return LoraConfig(**settings | {"init_lora_weights": False, "task_type": "CAUSAL_LM"} | changes)


def write_adapter(
    folder: Path, base: Path, config: Any, rows: int = VOCAB, seed: int = 1, named: str = ""
) -> Tensor:
    """Saves an adapter of `base` with random weights as training leaves it; the logits of base and adapter unmerged.
    `named` stands for the base in its config."""
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if rows != VOCAB:
            model.resize_token_embeddings(rows, mean_resizing=False)
        wrapped = get_peft_model(model, config)
        for value in wrapped.parameters():
            if value.requires_grad:
                value.data += 0.05 * torch.randn_like(value)
    wrapped.peft_config["default"].base_model_name_or_path = named or str(base)
    wrapped.save_pretrained(folder)
    return logits(wrapped.eval())


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def loaded_logits(folder: Path) -> Tensor:
    return logits(load_model(str(folder), "target", "cpu", "float32"))


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_lora_target_is_base_plus_scaled_products(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    """Catches a wrong scale, factors exchanged, layers left out, another tokenizer, and a base that is not named; the
    right weights come from the files by hand."""
    base = write_base(tmp_path / "base")
    write_adapter(tmp_path / "lora", base, lora())
    parts = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base)
    for name, weight in model.named_parameters():
        at = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{at}.lora_A.weight" in parts:
            weight.data += 16 / 4 * parts[f"{at}.lora_B.weight"] @ parts[f"{at}.lora_A.weight"]
    target = load_target(str(tmp_path / "lora"), "cpu")
    torch.testing.assert_close(logits(target.runner.model), logits(model), atol=1e-4, rtol=1e-5)
    assert not torch.allclose(logits(model), loaded_logits(base), atol=0.5)
    assert target.fingerprint == load_target(str(base), "cpu").fingerprint
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1  # for model, tokenizer and config together
    assert repr(str(tmp_path / "lora")) in lines[0]
    assert repr(str(base)) in lines[0]
    assert [folder.is_dir() for folder in cache.iterdir()].count(True) == 1


TIED = {"tie_word_embeddings": True}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "rslora": (lambda: lora(use_rslora=True), {}),
    "dora": (lambda: lora(use_dora=True), {}),
    "patterns": (lambda: lora(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3}), {}),
    "modules_to_save": (lambda: lora(modules_to_save=["norm", "lm_head"]), {}),
    "tokens": (lambda: lora(trainable_token_indices=[13, 15]), {}),
    "ia3": (
        lambda: IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
        ),
        {},
    ),
    "fan_in_fan_out": (lambda: lora(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True), {"arch": "gpt2"}),
    "tied head trained": (lambda: lora(modules_to_save=["lm_head"]), TIED),
    "tied embedding trained": (lambda: lora(modules_to_save=["embed_tokens"]), TIED),
    "tied, lora on embedding": (lambda: lora(target_modules=["q_proj", "embed_tokens"]), TIED),
    "tied, lora on head": (lambda: lora(target_modules=["q_proj", "lm_head"]), TIED),
    "tied, left alone": (lambda: lora(), TIED),
    "more tokens": (lambda: lora(), {"rows": VOCAB + 5}),
    "more tokens, tied": (lambda: lora(), {"rows": VOCAB + 5} | TIED),
    "more tokens, all trained": (lambda: lora(modules_to_save=["embed_tokens", "lm_head"]), {"rows": VOCAB + 5}),
    "fewer tokens": (lambda: lora(), {"rows": VOCAB - 4}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_merged_adapter_computes_what_peft_does_unmerged(case: str, tmp_path: Path) -> None:
    """Catches variants that are ignored, a tied head that changes with the embedding's adapter, or one that was
    trained and is dropped, and rows of a resized vocabulary that are lost."""
    config, changes = CASES[case]
    rows, arch = changes.get("rows", VOCAB), changes.get("arch", "llama")
    base_changes = {k: v for k, v in changes.items() if k not in ("rows", "arch")}
    if arch == "gpt2":
        base_changes |= {"n_layer": 2}
    base = write_base(tmp_path / "base", arch, **base_changes)
    wanted = write_adapter(tmp_path / "adapter", base, config(), rows)
    found = loaded_logits(tmp_path / "adapter")
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-5)
    plain, least = loaded_logits(base), min(rows, VOCAB)
    assert not torch.allclose(found[..., :least], plain[..., :least], atol=0.05)
    model = load_model(str(tmp_path / "adapter"), "target", "cpu", "float32")
    tied = case in ("tied, left alone", "more tokens, tied", "fan_in_fan_out")
    assert model.config.tie_word_embeddings == tied
    assert load_config(str(tmp_path / "adapter"), "target").vocab_size == rows


def test_whole_weights_are_not_changed_by_adapter_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    """Catches an adapter that is added twice, once in the merge and once by transformers."""
    base = write_base(tmp_path / "base")
    write_adapter(tmp_path / "leftover", base, lora())
    shutil.copytree(model_folder(str(tmp_path / "leftover"), "target"), tmp_path / "merged")
    shutil.rmtree(cache)
    capsys.readouterr()
    shutil.copytree(tmp_path / "merged", tmp_path / "leftover", dirs_exist_ok=True)
    found = load_target(str(tmp_path / "leftover"), "cpu")
    torch.testing.assert_close(
        logits(found.runner.model), loaded_logits(tmp_path / "merged"), rtol=0, atol=0
    )
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "leftover" in lines[0]
    assert "ignored" in lines[0]
    assert not cache.exists()
    assert draft_sha256(str(tmp_path / "leftover")) == draft_sha256(str(tmp_path / "merged"))


@pytest.mark.parametrize("weights", ["shards", "damaged config"])
def test_other_leftovers_change_nothing_either(weights: str, tmp_path: Path) -> None:
    """Catches whole weights in shards that are taken for none, and leftovers that are read at all."""
    base = write_base(tmp_path / "base")
    write_adapter(tmp_path / "adapter", base, lora())
    wanted, model = loaded_logits(base), AutoModelForCausalLM.from_pretrained(base)
    folder = tmp_path / "folder"
    model.save_pretrained(folder, max_shard_size="60KB" if weights == "shards" else "5GB")
    assert (folder / f"{WEIGHTS}.index.json").exists() == (weights == "shards")
    for file in ("adapter_config.json", ADAPTER):
        shutil.copy(tmp_path / "adapter" / file, folder)
    if weights == "damaged config":
        (folder / "adapter_config.json").write_text("{")
    torch.testing.assert_close(loaded_logits(folder), wanted, rtol=0, atol=0)


def test_an_adapter_drafts(tmp_path: Path) -> None:
    """Catches a draft that is its base, or that is refused: the target itself as an adapter accepts every token."""
    base = write_base(tmp_path / "base")
    write_adapter(tmp_path / "lora", base, lora())
    target = load_target(str(tmp_path / "lora"), "cpu")
    assert draft_family(str(tmp_path / "lora")) == "causal"
    prompts = [IDS[0].tolist(), IDS[1, :7].tolist()]
    for folder, all_accepted in (("lora", True), ("base", False)):
        draft = load_draft(str(tmp_path / folder), target)
        outputs = decode(target, draft, prompts, max_new_tokens=13, k=3)
        counts = [counts for output in outputs for counts in output.rounds]
        assert all(drafted == accepted for drafted, accepted in counts) == all_accepted
    merged = model_folder(str(tmp_path / "lora"), "draft")
    assert draft_sha256(str(tmp_path / "lora")) == draft_sha256(merged) is not None


def test_a_changed_adapter_or_base_is_merged_anew(tmp_path: Path, cache: Path) -> None:
    """Catches a cached folder of other weights: two adapters of one base, one trained further, another base under the
    same path, another tokenizer."""
    base = write_base(tmp_path / "base")
    first = write_adapter(tmp_path / "first", base, lora())
    second = write_adapter(tmp_path / "second", base, lora(), seed=2)
    folders = [model_folder(str(tmp_path / name), "target") for name in ("first", "second")]
    torch.testing.assert_close(loaded_logits(tmp_path / "first"), first, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(loaded_logits(tmp_path / "second"), second, atol=1e-4, rtol=1e-5)
    assert model_folder(str(tmp_path / "first"), "target") == folders[0]  # found, not made again
    third = write_adapter(tmp_path / "first", base, lora(), seed=3)
    torch.testing.assert_close(loaded_logits(tmp_path / "first"), third, atol=1e-4, rtol=1e-5)
    folders.append(model_folder(str(tmp_path / "first"), "target"))
    edit_config(tmp_path / "first", lora_alpha=8)
    folders.append(model_folder(str(tmp_path / "first"), "target"))
    tensors = {name: 2 * value for name, value in load_file(base / WEIGHTS).items()}
    times = (base / WEIGHTS).stat()
    save_file(tensors, base / WEIGHTS, metadata={"format": "pt"})
    os.utime(base / WEIGHTS, ns=(times.st_atime_ns, times.st_mtime_ns))  # as copying tools do
    folders.append(model_folder(str(tmp_path / "first"), "target"))
    byte_tokenizer(reverse=True).save_pretrained(tmp_path / "first")
    folders.append(model_folder(str(tmp_path / "first"), "target"))
    assert len(set(folders)) == len(folders)
    assert sum(folder.is_dir() for folder in cache.iterdir()) == len(folders)
    own = load_tokenizer(str(tmp_path / "first"))
    assert own("a")["input_ids"] == byte_tokenizer(reverse=True)("a")["input_ids"]
    assert own("a")["input_ids"] != load_tokenizer(str(base))("a")["input_ids"]


@pytest.mark.parametrize("where", ["base", "adapter"])
def test_named_chat_templates_are_kept(where: str, tmp_path: Path) -> None:
    """Catches templates in a folder of their own, which a copy of single files leaves behind."""
    base = write_base(tmp_path / "base")
    write_adapter(tmp_path / "adapter", base, lora())
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "D", "rag": "R", "tool_use": "T"}
    tokenizer.save_pretrained(tmp_path / where)
    assert load_tokenizer(str(tmp_path / "adapter")).chat_template == tokenizer.chat_template
    before = model_folder(str(tmp_path / "adapter"), "target")
    (tmp_path / where / "additional_chat_templates" / "rag.jinja").write_text("R2")
    assert load_tokenizer(str(tmp_path / "adapter")).chat_template["rag"] == "R2"
    assert model_folder(str(tmp_path / "adapter"), "target") != before


def test_a_base_is_found_beside_its_adapter_and_may_be_one(tmp_path: Path) -> None:
    """Catches relative paths that count from elsewhere, and adapters on adapters."""
    base = write_base(tmp_path / "base")
    write_adapter(tmp_path / "lora", base, lora(), named="../base")
    lower = loaded_logits(tmp_path / "lora")
    merged = Path(model_folder(str(tmp_path / "lora"), "target"))
    wanted = write_adapter(tmp_path / "upper", merged, lora(), seed=5, named="../lora")
    torch.testing.assert_close(loaded_logits(tmp_path / "upper"), wanted, atol=1e-4, rtol=1e-5)
    assert not torch.allclose(lower, wanted, atol=0.5)
    edit_config(tmp_path / "lora", base_model_name_or_path="../upper")
    with pytest.raises(UserError, match="each other's base"):
        model_folder(str(tmp_path / "lora"), "target")


def test_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an adapter or a base that is a name on the Hub, from its cache without a network; and a repository with
    whole weights and leftovers."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(
        "huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub")
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def place(name: str, commit: str) -> Path:
        folder = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(commit)
        return folder / "snapshots" / commit

    base = write_base(place("some/base", "a" * 40))
    snapshot = place("some/lora", "b" * 40)
    wanted = write_adapter(snapshot, base, lora(), named="some/base")
    found = load_target("some/lora", "cpu")
    torch.testing.assert_close(logits(found.runner.model), wanted, atol=1e-4, rtol=1e-5)
    assert load_tokenizer("some/lora")("ab")["input_ids"] == byte_tokenizer()("ab")["input_ids"]
    both = write_base(place("some/both", "c" * 40))
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(snapshot / file, both)
    plain = load_model("some/both", "target", "cpu", "float32")
    torch.testing.assert_close(logits(plain), loaded_logits(base), rtol=0, atol=0)
    edit_config(snapshot, base_model_name_or_path="some/absent")
    with pytest.raises(UserError, match="'some/absent'") as raised:
        load_target("some/lora", "cpu")
    assert "\n" not in str(raised.value)


def test_a_quantised_base_is_dequantised_or_refused(tmp_path: Path) -> None:
    """Catches an adapter that is rounded to the base's few bits, and a base that is read as if it were plain."""
    base = write_base(tmp_path / "base")
    write_adapter(tmp_path / "lora", base, lora(target_modules=["q_proj"]))
    settings, pack = FORMS["fp8"]
    tensors = load_file(base / WEIGHTS)
    name = "model.layers.0.mlp.up_proj"
    packed = pack(tensors[f"{name}.weight"].shape[1], tensors[f"{name}.weight"].shape[0], 0)
    plain = tensors | {f"{name}.weight": packed.weight}
    del tensors[f"{name}.weight"]
    tensors |= {f"{name}.{part}": value for part, value in packed.tensors.items()}
    config = json.loads((base / "config.json").read_text())
    save_file(plain, base / WEIGHTS, metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(base)
    wanted = logits(PeftModel.from_pretrained(model, tmp_path / "lora"))
    save_file(tensors, base / WEIGHTS, metadata={"format": "pt"})
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    torch.testing.assert_close(loaded_logits(tmp_path / "lora"), wanted, atol=1e-3, rtol=1e-4)
    bits = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": bits}))
    with pytest.raises(UserError, match=r"is an adapter .* quantised \(bitsandbytes\)"):
        model_folder(str(tmp_path / "lora"), "target")


def surplus(base: Path, adapter: Path) -> None:
    file = adapter / ADAPTER
    save_file(load_file(file) | {"base_model.model.score.weight": torch.ones(2, 32)}, file)


REFUSALS: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "width": (lambda b, a: write_base(b, hidden_size=48), "two cannot be merged"),
    "fewer layers": (
        lambda b, a: write_base(b, num_hidden_layers=1), "has no place for base_model.model.model.layers.1",
    ),
    "more layers": (lambda b, a: write_base(b, num_hidden_layers=3), "lacks base_model.model.model.layers.2"),
    "architecture": (lambda b, a: (shutil.rmtree(b), write_base(b, "gpt2")), "two cannot be merged"),
    "no base": (lambda b, a: shutil.rmtree(b), "does not exist"),
    "pickle": (lambda b, a: (a / ADAPTER).rename(a / "adapter_model.bin"), "pickle .* safetensors"),
    "no weights": (lambda b, a: (a / ADAPTER).unlink(), "there are no weights"),
    "surplus": (surplus, "score"),
    "unnamed": (lambda b, a: edit_config(a, base_model_name_or_path=None), "names no base"),
    "hub": (lambda b, a: edit_config(a, base_model_name_or_path="some/base"), "'some/base'"),
    "itself": (lambda b, a: edit_config(a, base_model_name_or_path=str(a)), "each other's base"),
    "task": (lambda b, a: edit_config(a, task_type="SEQ_CLS"), "SEQ_CLS"),
    "method": (lambda b, a: edit_config(a, peft_type="NEWEST"), "NEWEST"),
    "megatron": (lambda b, a: edit_config(a, megatron_config={"x": 1}, megatron_core="os"), "made for Megatron"),
    "repeated": (lambda b, a: edit_config(a, layer_replication=[[0, 2], [1, 2]]), "repeats layers"),
}  # fmt: skip


@pytest.mark.parametrize(("case", "with_config"), rotated(REFUSALS, [False, True]))
def test_what_cannot_be_merged_is_refused(
    case: str, with_config: bool, tmp_path: Path, cache: Path
) -> None:
    """Catches tensors that are dropped without a word, pickles that are read, and tracebacks: one line names the
    adapter, and its base where there is one; nothing is left in the cache. A config.json beside it changes nothing."""
    base, adapter = write_base(tmp_path / "base"), tmp_path / "lora"
    write_adapter(adapter, base, lora())
    if with_config:
        shutil.copy(base / "config.json", adapter)
    change, named = REFUSALS[case]
    change(base, adapter)
    with pytest.raises(UserError, match=named) as raised:
        load_target(str(adapter), "cpu")
    assert "\n" not in str(raised.value)
    assert repr(str(adapter)) in str(raised.value)
    assert not [file for file in cache.glob("*") if file.is_dir()]


def test_prompts_that_were_trained_have_no_merged_form(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    write_adapter(
        tmp_path / "prefix", base, PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    )
    with pytest.raises(UserError, match="PREFIX_TUNING.*no merged form"):
        load_target(str(tmp_path / "prefix"), "cpu")
