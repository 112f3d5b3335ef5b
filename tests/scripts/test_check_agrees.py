"""The checker and the decoder agree on a folder: what one refuses the other does not pass, whoever wrote it."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.common.errors import UserError
from decode.drafts import mtp
from decode.drafts.registry import load_draft
from decode.model.loading import Target, load_model
from decode.serving.checker import DECODER_RULE, ENGINES, check_draft_files
from decode.serving.rules import IGNORED, REFUSED, SILENT, Finding
from eval.served.reading import combine, edit_tensors, set_config
from tests.decode.checkpoints import test_importers
from tests.decode.checkpoints.test_importers import TRAINERS, edited, quietly
from tests.decode.checkpoints.test_layouts import V, small_target
from tests.decode.drafts import test_dflash, test_peagle
from tests.decode.drafts.test_mtp import native_folder
from tests.tiny import tiny_model

Edit = Callable[[Path], Any]
FP8 = torch.float8_e4m3fn
BUNDLED = str(test_importers.ASSETS / "target")


def block_heads(name: str) -> Callable[[Path, Target], tuple[str, Any]]:
    """DFlash, DSpark or P-EAGLE without draftsmith.json, as other trainers leave it."""

    def write(folder: Path, own: Target) -> tuple[str, Any]:
        layers = (0, 1, 2) if name == "peagle" else (1, 2)
        ids = torch.tensor([i for i in range(V) if i % 7 != 1])
        if name == "peagle":
            net: Any = test_peagle.net_of(own, ids, layers)
            config = test_peagle.fields(own, ids, layers)
        else:
            net = test_dflash.net_of(name, own, ids, layers)
            config = test_dflash.fields(name, own, ids, layers)
        tensors = net.state_dict() | test_importers.maps(net)
        return test_importers.write(folder, config, tensors, "model.safetensors"), net

    return write


WRITERS = {**TRAINERS, **{name: block_heads(name) for name in ("peagle", "dflash", "dspark")}}
Case = tuple[str, Edit, str]
GOOD: Edit = lambda folder: None  # noqa: E731
IDS = "eagle_aux_hidden_state_layer_ids"
config = edited


def nested(**changes: Any) -> Edit:
    return set_config("transformer_layer_config", **changes)


def put(name: str, value: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> Edit:
    return edit_tensors(lambda t: t.__setitem__(name, value(t)))


FC, SPEC, SPECFORGE = "fc.weight", "eagle3 of speculators", "eagle3 of SpecForge"
DOWN = "midlayer.mlp.down_proj.weight"
TABLE: dict[str, Case] = {
    # (who wrote it, what was done to it, what the decoder says; "" where it reads it)
    **{f"{name} as it is": (name, GOOD, "") for name in WRITERS},
    "GELU": (SPECFORGE, set_config(hidden_act="gelu"), ""),
    "an unknown activation": (SPECFORGE, set_config(hidden_act="mish"), "'mish'"),
    "an unknown activation, nested": (SPEC, nested(hidden_act="mish"), "'mish'"),
    "an unknown activation of blocks": ("dflash", set_config(hidden_act="mish"), "'mish'"),
    "an unknown activation of P-EAGLE": ("peagle", set_config(hidden_act="mish"), "'mish'"),
    "GELU in Medusa": ("medusa for vLLM", set_config(hidden_act="gelu"), "'gelu'"),
    "two activations": (
        SPECFORGE,
        set_config(hidden_activation="gelu_pytorch_tanh"),
        "'gelu_pytorch_tanh' and 'silu'",
    ),
    "four layer ids": (SPEC, config(lambda c: c[IDS].append(8)), ""),
    "five layer ids": (SPEC, config(lambda c: c[IDS].extend([7, 8])), "fc.weight reads 48 numbers"),
    "a surplus id in the middle": (SPEC, config(lambda c: c[IDS].insert(0, 7)), "fc.weight reads 48 numbers"),
    "two layer ids": (
        SPECFORGE,
        config(lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[0, 2])),
        "fc.weight reads 48 numbers",
    ),
    "four ids of DFlash": ("dflash", config(lambda c: c[IDS].append(8)), ""),
    "no ids of DSpark": (
        "dspark", config(lambda c: (c.pop(IDS), c["dflash_config"].pop("target_layer_ids"))), "names no layers"
    ),
    "phi3 with Llama's tensors": (SPECFORGE, set_config(model_type="phi3"), ""),
    "no architecture and phi3": (
        SPECFORGE,
        config(lambda c: (c.update(model_type="phi3"), c.pop("architectures"))),
        "'phi3'",
    ),
    "Gemma's layer": (
        SPECFORGE, set_config(architectures=["Gemma2ForCausalLMEagle3"]), "'gemma2'",
    ),
    "Gemma's layers of DFlash": ("dflash", set_config(model_type="gemma3_text"), "'gemma3_text'"),
    "partial rotary": (SPECFORGE, set_config(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "partial rotary in RoPE": (
        "dflash",
        config(lambda c: c["rope_parameters"].update(partial_rotary_factor=0.5)),
        "partial_rotary_factor",
    ),
    "another RoPE": (
        SPECFORGE,
        set_config(rope_scaling={"rope_type": "ntk-by-parts", "factor": 2.0}),
        "'ntk-by-parts'",
    ),
    "two RoPE bases": (
        "dspark", set_config(rope_theta=123.0), "RoPE base 123.0",
    ),
    "soft caps": (SPECFORGE, set_config(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
    "a multiplier": (SPEC, nested(attention_multiplier=0.1), "attention_multiplier"),
    "norms of queries": (SPECFORGE, set_config(use_qk_norm=True), "use_qk_norm"),
    "biases of queries": (SPECFORGE, put("midlayer.self_attn.q_proj.bias", lambda t: torch.ones(16)), "q_proj.bias"),
    "biases by a flag": ("dflash", set_config(attention_bias=True), "attention_bias"),
    "the last state alone": (
        SPECFORGE,
        config(lambda c: c["eagle_config"].update(use_aux_hidden_state=False)),
        "last hidden state alone",
    ),
    "an unused tensor": (SPECFORGE, put("adapter.weight", lambda t: torch.ones(3)), "adapter.weight"),
    "an unused tensor of blocks": ("dspark", put("adapter.weight", lambda t: torch.ones(3)), "adapter.weight"),
    "a surplus head": ("medusa for vLLM", put("blocks.3.layers.0.weight", lambda t: torch.ones(16, 16)), "blocks.3"),
    "a map that nothing needs": (
        SPEC,
        put("d2t", lambda t: torch.cat([torch.zeros(V - 1), torch.ones(1)]).long()),
        "the map of a reduced vocabulary",
    ),
    "norms by a flag alone": (SPECFORGE, set_config(fc_norm=True), "fc_norm.0.weight is missing"),
    "a tied head of its own": (
        SPEC,
        combine(nested(tie_word_embeddings=True), edit_tensors(lambda t: t.pop("lm_head.weight"))),
        "ties its output matrix",
    ),
    "another corrector": ("dspark", set_config(markov_head_type="rnn"), "'rnn'"),
    "FP8 without a scale": (SPECFORGE, put(FC, lambda t: t[FC].to(FP8)), "float8_e4m3fn, and no scale"),
    "int8 without a scale": ("dflash", put(FC, lambda t: t[FC].to(torch.int8)), "int8, and no scale"),
    "an unknown method": (
        SPECFORGE,
        lambda folder: (
            put(FC, lambda t: t[FC].to(FP8))(folder),
            set_config(quantization_config={"quant_method": "quark"})(folder),
        ),
        "quantised by quark",
    ),
    "FP8 with a scale": (
        SPECFORGE,
        edit_tensors(lambda t: t.update({DOWN: t[DOWN].to(FP8), f"{DOWN}_scale": torch.tensor(2.0)})),
        "",
    ),
    "not finite": ("dspark", put("norm.weight", lambda t: torch.full((16,), torch.nan)), "not finite"),
}  # fmt: skip


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    small_target().runner.model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", TABLE)
def test_checker_and_decoder_agree(name: str, tmp_path: Path, target_folder: str) -> None:
    """Catches any folder that the decoder refuses and the checker passes, with a target and without, in any engine; and
    one that the decoder reads and the checker says it does not. The refusal is one line about the right thing."""
    writer, edit, reason = TABLE[name]
    own = small_target()
    folder = tmp_path / "draft"
    path, _ = WRITERS[writer](folder, own)
    if (folder / "pytorch_model.bin").is_file() and edit is not GOOD:
        raise AssertionError("edits need safetensors")
    edit(folder)
    said = ""
    try:
        quietly(path, own)
    except UserError as error:
        said = str(error)
    assert "\n" not in said
    assert (reason in said) if reason else said == "", said
    for target in ("", target_folder):
        for engine in ENGINES:
            findings = check_draft_files(path, engine, target=target)
            if [f.rule for f in findings] == ["unchecked"]:
                continue
            refused = [f.what for f in findings if f.rule == DECODER_RULE]
            assert refused == ([said] if said else []), (engine, target, findings)
            if said:
                assert any(f.effect != IGNORED for f in findings)


def findings_on(what: str, path: str, engine: str, target: str = "") -> list[Finding]:
    return [f for f in check_draft_files(path, engine, target=target) if what in f.what]


def test_the_checker_compares_fc_with_ids(tmp_path: Path, target_folder: str) -> None:
    """Catches a head whose fc reads three states passed for an engine that gives it four."""
    own = small_target()
    path, _ = TRAINERS[SPEC](tmp_path / "d", own)
    assert findings_on("fc.weight", path, "vllm", target_folder) == []
    TABLE["four layer ids"][1](tmp_path / "d")
    found = findings_on("fc.weight", path, "vllm", target_folder)
    assert [(f.rule, f.effect) for f in found] == [("shapes", REFUSED)]
    assert "fc.weight is [8, 48] and config.json implies [8, 64]" in found[0].what


def renumbered(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy of layer 3 as layer 4."""
    three = "model.layers.3."
    own = {name: value for name, value in tensors.items() if name.startswith(three)}
    return {name.replace(three, "model.layers.4."): value for name, value in own.items()}


@pytest.mark.parametrize("change", ["as it is", "another head", "another eps", "a second layer"])
def test_mtp_layers_agree(change: str, tmp_path: Path) -> None:
    """Catches a matrix or an epsilon of the layer's own that nobody reads, and a second layer dropped in silence."""
    _, own = native_folder(tmp_path, "llama")
    head = f"model.layers.3.{mtp.HEAD}"
    if change == "another head":
        put(head, lambda t: t[head] + 1)(tmp_path)
    if change == "another eps":
        set_config(rms_norm_eps=0.1)(tmp_path)
    if change == "a second layer":
        edit_tensors(lambda t: t.update(renumbered(t)))(tmp_path)
    reason = {"another head": "an output matrix of its own", "another eps": "rms_norm_eps 0.1"}
    said = ""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            load_draft(str(tmp_path), own)
        except UserError as error:
            said = str(error)
    assert reason.get(change, "") in said
    assert bool(said) == (change in reason)
    lines = [one for one in seen if "MTP layers [4] too" in str(one.message)]
    assert len(lines) == (change == "a second layer")
    target = tmp_path / "target"
    own.runner.model.save_pretrained(target)
    found = check_draft_files(str(tmp_path), "vllm", target=str(target))
    assert [f.what for f in found if f.rule == DECODER_RULE] == ([said] if said else [])


def test_causal_drafts_agree(tmp_path: Path) -> None:
    """Catches FP8 weights of a language model whose config.json names no method, read as they stand."""
    own = BUNDLED
    shutil.copytree(test_importers.causal(tmp_path / "good", 4096), tmp_path / "bad")
    assert [f.rule for f in check_draft_files(str(tmp_path / "good"), "vllm", target=own)] == []
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(lambda t: t.update({name: t[name].to(FP8), f"{name}_scale": torch.tensor(3.0)}))(
        tmp_path / "bad"
    )
    line = f"{name} is F8_E4M3, and config.json has no quantization_config"
    with pytest.raises(UserError, match=line):
        load_model(str(tmp_path / "bad"), "draft", "cpu", "float32")
    found = check_draft_files(str(tmp_path / "bad"), "vllm", target=own)
    [refusal] = [f for f in found if f.rule == DECODER_RULE]
    assert line in refusal.what


# ---- drafts whose context is shorter than the target's ----


@pytest.mark.parametrize(
    ("engine", "effect", "words"),
    [
        ("vllm", SILENT, "nothing is drafted for a whole batch"),
        ("sglang", REFUSED, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"),
        ("trtllm", REFUSED, "refuses longer requests"),
        ("llamacpp", SILENT, "few tokens are accepted"),
        ("transformers", SILENT, "few tokens are accepted"),
    ],
)
@pytest.mark.parametrize("family", ["causal", "eagle3"])
def test_a_short_draft_is_found_in_each_engine(
    family: str, engine: str, effect: str, words: str, tmp_path: Path, target_folder: str
) -> None:
    """Catches a draft that serves few tokens, or none, in long texts and is called fit; and a finding about one that is
    as long as its target."""
    if family == "eagle3":
        path, target = TRAINERS[SPECFORGE](tmp_path / "d", small_target())[0], target_folder
    else:
        path, target = test_importers.causal(tmp_path / "d", 4096), BUNDLED
    if family == "eagle3" and engine == "transformers":
        pytest.skip("it takes no heads")
    assert findings_on("can read", path, engine, target) == []
    set_config(max_position_embeddings=40)(tmp_path / "d")
    [found] = findings_on("can read", path, engine, target)
    assert found.effect == effect
    assert found.rule == ("context-rope" if engine == "transformers" else "context")
    longest = 512 if family == "causal" else 64
    assert f"the draft can read 40 tokens and the target {longest}" in found.what
    assert words in found.what
    assert findings_on("can read", path, engine) == []


def test_a_short_table_of_positions_ends_transformers(tmp_path: Path) -> None:
    model = tiny_model("gpt2", vocab_size=4096, n_positions=40)
    model.save_pretrained(tmp_path / "d")
    for file in (test_importers.ASSETS / "target").glob("tokenizer*"):
        shutil.copyfile(file, tmp_path / "d" / file.name)
    [one] = findings_on("can read", str(tmp_path / "d"), "transformers", BUNDLED)
    assert (one.rule, one.effect) == ("context", REFUSED)
    assert "IndexError" in one.what
