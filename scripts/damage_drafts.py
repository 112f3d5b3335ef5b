"""What a damaged draft does in vLLM: refused, or served in silence with fewer tokens accepted?

    python scripts/damage_drafts.py --drafts outputs/compare/drafts --python ~/vllm/bin/python --out served_damage.json

Copies of good drafts, each with one mistake that exporters are known to make, are checked (scripts/check_draft.py) and
then decoded by vLLM, beside the good ones. A draft that proposes nonsense costs no output, so vLLM says nothing: only
what it accepts does. DAMAGE is the list, and the checker's tests run over all of it.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from decode import formats, published, runs
from decode.drafts.base import FACTS, family_of, read_facts
from decode.settings import UserError, run_command
from decode.target import load_target
from eval import vllm_engine
from eval.tasks import Task, load_items
from scripts import export, referee
from scripts.check_draft import findings

Tensors = dict[str, torch.Tensor]
Edit = Callable[[Path], None]


@dataclass(frozen=True)
class Damage:
    """One mistake: of which family, what it does to a folder, and the rules of each engine that must see it."""

    family: str
    edit: Edit
    seen: dict[str, str]
    """The rule's name by engine; an engine that is left out reads the folder as it was meant."""
    served: bool = True
    """Shown in vLLM by the command: what it refuses is told by one or two examples."""


def config(**changes: Any) -> Edit:
    """Settings changed; None takes a setting away."""

    def edit(folder: Path) -> None:
        file = folder / "config.json"
        held = json.loads(file.read_text()) | changes
        kept = {
            key: value for key, value in held.items() if value is not None or key not in changes
        }
        file.write_text(json.dumps(kept, indent=1))

    return edit


def tensors(change: Callable[[Tensors], Any]) -> Edit:
    """Tensors changed in place."""

    def edit(folder: Path) -> None:
        held = load_file(folder / formats.WEIGHTS)
        change(held)
        save_file(
            {name: value.contiguous() for name, value in held.items()}, folder / formats.WEIGHTS
        )

    return edit


def both(*edits: Edit) -> Edit:
    def edit(folder: Path) -> None:
        for one in edits:
            one(folder)

    return edit


def rename(old: str, new: str) -> Edit:
    return tensors(lambda held: held.update({new: held.pop(old)}))


def drop(name: str) -> Edit:
    return tensors(lambda held: held.pop(name))


def add(**shapes_of: str) -> Edit:
    """New tensors of ones, each as another one is shaped; __ stands for a dot."""

    def change(held: Tensors) -> None:
        for name, like in shapes_of.items():
            held[name.replace("__", ".")] = torch.ones_like(held[like])

    return tensors(change)


def cast(name: str, dtype: torch.dtype) -> Edit:
    return tensors(lambda held: held.update({name: held[name].to(dtype)}))


def as_ids(held: Tensors) -> None:
    held["d2t"] = held["d2t"] + torch.arange(len(held["d2t"]))


def next_token(held: Tensors) -> None:
    """Each draft id one token on, but for the last ones, which must stay in the vocabulary."""
    ids = held["d2t"] + torch.arange(len(held["d2t"]))
    free = int(held["t2d"].numel()) - int(ids[-1]) - 1
    held["d2t"] = (
        held["d2t"] + 1
        if free
        else held["d2t"] - (ids > int(ids[0])).long() * (held["d2t"] > 0).long()
    )


def nan(name: str) -> Edit:
    return tensors(lambda held: held[name].view(-1)[:1].fill_(float("nan")))


def one_bias(held: Tensors) -> None:
    held["fc.bias"] = torch.ones_like(held["fc.bias"])


def query_bias(held: Tensors) -> None:
    name = "midlayer.self_attn.q_proj"
    held[f"{name}.bias"] = torch.ones(len(held[f"{name}.weight"]))


def nested(folder: Path) -> None:
    """The draft in the speculators format."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "nested"
        facts = json.loads((folder / FACTS).read_text())
        target = facts.get("target", {}).get("name", "")
        found = published.read(str(folder))
        formats.write(out, *export.speculators(found, target, 4))
        for file in out.iterdir():
            shutil.copyfile(file, folder / file.name)


def layer_setting(key: str, value: Any) -> Edit:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        held = json.loads(file.read_text())
        held["transformer_layer_config"][key] = value
        file.write_text(json.dumps(held))

    return edit


def rope_base(new: float) -> Edit:
    return config(rope_parameters={"rope_type": "default", "rope_theta": new})


def taps(count: int, top: int | None, output: int | None) -> Edit:
    """Default layers of a target of `count` written under vLLM's key, SGLang's or both, off by so many."""
    layers = formats.default_layers(count)
    changes: dict[str, Any] = {}
    if top is not None:
        changes["eagle_aux_hidden_state_layer_ids"] = [i + top for i in layers]
    if output is not None:
        ids = [i + output for i in layers]
        changes["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    return config(**changes)


def everywhere(rule: str, *, but: tuple[str, ...] = ()) -> dict[str, str]:
    return {engine: rule for engine in ("vllm", "sglang", "trtllm") if engine not in but}


def of_lm(rule: str) -> dict[str, str]:
    return everywhere(rule) | {"transformers": rule}


def damages(layers: int) -> dict[str, Damage]:
    """All of them, for a target of so many layers."""
    mid = "midlayer"
    e3 = {
        "a matrix is missing": Damage(
            "eagle3", drop(f"{mid}.self_attn.o_proj.weight"), everywhere("missing-tensor")
        ),
        "the last norm is missing": Damage("eagle3", drop("norm.weight"), everywhere("missing-tensor")),
        "a tensor is renamed": Damage(
            "eagle3", rename("fc.weight", "fusion.weight"), everywhere("unknown-tensor")
        ),
        "a second layer": Damage(
            "eagle3",
            add(layers__1__mlp__up_proj__weight=f"{mid}.mlp.up_proj.weight"),
            everywhere("unknown-tensor"),
            served=False,
        ),
        "a layer too many is said": Damage(
            "eagle3", config(num_hidden_layers=2), everywhere("layers"), served=False
        ),
        "d2t holds ids": Damage("eagle3", tensors(as_ids), everywhere("map")),
        "d2t is one token off": Damage("eagle3", tensors(next_token), everywhere("map")),
        "d2t is missing": Damage("eagle3", drop("d2t"), everywhere("map-missing")),
        "d2t in bfloat16": Damage("eagle3", cast("d2t", torch.bfloat16), everywhere("map-dtype")),
        "t2d in int64": Damage(
            "eagle3", cast("t2d", torch.int64), everywhere("members-dtype", but=("trtllm",)), served=False
        ),
        "taps of the other convention": Damage(
            "eagle3", taps(layers, -1, None), {"vllm": "taps", "sglang": "taps-unread"}
        ),
        "taps counted from 1 for SGLang": Damage(
            "eagle3",
            taps(layers, 0, 0), everywhere("taps-disagree") | {"sglang": "taps"},
            served=False,
        ),
        "taps that differ by two": Damage(
            "eagle3", taps(layers, 0, -2), everywhere("taps-disagree"), served=False
        ),
        "taps for SGLang alone": Damage("eagle3", taps(layers, None, -1), {"vllm": "taps"}),
        "norm_before_residual": Damage(
            "eagle3",
            config(norm_before_residual=True),
            everywhere("norm-before-residual") | {"vllm": "norm-flags"},
        ),
        "norm_output": Damage("eagle3", config(norm_output=True), everywhere("norm-flags")),
        "norm_before_fc": Damage(
            "eagle3",
            config(norm_before_fc=True),
            everywhere("missing-tensor") | {"trtllm": "norm-before-fc"},
        ),
        "fc_norm": Damage("eagle3", config(fc_norm=True), everywhere("missing-tensor")),
        "draft_vocab_size is missing": Damage(
            "eagle3", config(draft_vocab_size=None), everywhere("draft-vocabulary"), served=False
        ),
        "draft_vocab_size is wrong": Damage(
            "eagle3", config(draft_vocab_size=17), everywhere("shapes"), served=False
        ),
        "vocab_size is the draft's": Damage(
            "eagle3", config(vocab_size=17), everywhere("vocabulary"), served=False
        ),
        "head_dim": Damage("eagle3", config(head_dim=2), everywhere("shapes"), served=False),
        "K/V heads": Damage("eagle3", config(num_key_value_heads=1), everywhere("shapes"), served=False),
        "rope_parameters": Damage("eagle3", rope_base(1e6), everywhere("rope")),
        "no rope keys": Damage(
            "eagle3",
            config(rope_parameters=None, rope_theta=None, rope_scaling=None),
            {"vllm": "rope", "sglang": "rope-keys", "trtllm": "rope-keys"},
            served=False,
        ),
        "another base, said twice": Damage(
            "eagle3", both(rope_base(1e6), config(rope_theta=1e6)), everywhere("rope"), served=False
        ),
        "attention_bias": Damage("eagle3", config(attention_bias=True), everywhere("bias-flags")),
        "a bias of the layer": Damage(
            "eagle3",
            tensors(query_bias),
            everywhere("dropped-bias"),
            served=False,
        ),
        "attention_bias is missing": Damage(
            "eagle3", config(attention_bias=None), {"trtllm": "settings"}, served=False
        ),
        "a norm that no flag turns on": Damage(
            "eagle3",
            add(input_norm__weight="norm.weight"),
            everywhere("unknown-tensor") | {"vllm": "skipped-tensor"},
            served=False,
        ),
        "tied embeddings": Damage(
            "eagle3", config(tie_word_embeddings=True), {"sglang": "tied"}, served=False
        ),
        "another activation": Damage("eagle3", config(hidden_act="gelu"), everywhere("activation"), served=False),
        "another width of target": Damage(
            "eagle3", config(target_hidden_size=8), everywhere("target-width"), served=False
        ),
        "another architecture": Damage(
            "eagle3",
            config(architectures=["MistralForCausalLM"]),
            {"vllm": "architecture", "sglang": "architecture"},
            served=False,
        ),
        "not a number": Damage("eagle3", nan("fc.weight"), everywhere("finite"), served=False),
        "another dtype is said": Damage("eagle3", config(dtype="float64"), everywhere("dtype"), served=False),
        "integers for weights": Damage(
            "eagle3", cast("fc.weight", torch.int8), everywhere("floating"), served=False
        ),
        "nested, flag unsaid": Damage(
            "eagle3",
            both(nested, config(norm_before_residual=None)),
            everywhere("nested-config") | {"vllm": "nested-norm-flag"},
        ),
        "nested, model_type on top": Damage(
            "eagle3",
            both(nested, config(model_type="llama")),
            everywhere("nested-config"),
            served=False,
        ),
        "nested, layer of another kind": Damage(
            "eagle3", both(nested, layer_setting("model_type", "qwen3")), everywhere("nested-config"), served=False
        ),
        "nested, without tokens to draft": Damage(
            "eagle3", both(nested, config(speculators_config={})), everywhere("nested-config"), served=False
        ),
        "nested, maps of a whole vocabulary": Damage(
            "eagle3",
            both(nested, config(draft_vocab_size=None), drop("lm_head.weight")),
            everywhere("map-superfluous") | {"trtllm": "nested-config"},
            served=False,
        ),
    }  # fmt: skip
    layer = "layers.0"
    e1 = {
        "a first norm": Damage(
            "eagle1",
            add(layers__0__input_layernorm__weight=f"{layer}.post_attention_layernorm.weight"),
            everywhere("unknown-tensor", but=("trtllm",)),
        ),
        "a head of its own": Damage(
            "eagle1",
            add(lm_head__weight="fc.weight"),
            everywhere("unknown-tensor", but=("trtllm",)),
            served=False,
        ),
        "fc with a bias": Damage("eagle1", tensors(one_bias), {"vllm": "dropped-bias"}),
        "fc without its zeros": Damage("eagle1", drop("fc.bias"), {"sglang": "fc-bias"}, served=False),
        "bias": Damage("eagle1", config(bias=True), everywhere("bias-flags", but=("trtllm",))),
        "a matrix is missing (1)": Damage(
            "eagle1",
            drop(f"{layer}.mlp.down_proj.weight"),
            everywhere("missing-tensor", but=("trtllm",)),
        ),
        "one architecture for both (1)": Damage(
            "eagle1", config(architectures=["LlamaForCausalLM"]), {"sglang": "architecture"}, served=False
        ),
    }  # fmt: skip
    md = {
        "medusa_fc_bias is missing": Damage(
            "medusa", config(medusa_fc_bias=None), {"vllm": "dropped-bias"}
        ),
        "original_lm_head": Damage(
            "medusa", config(original_lm_head=True), {"vllm": "shared-projection"}
        ),
        "a projection is missing": Damage(
            "medusa", drop("lm_heads.1.weight"), {"vllm": "missing-tensor"}
        ),
        "a block is renamed": Damage(
            "medusa",
            rename("blocks.1.layers.0.weight", "blocks.1.linear.weight"),
            {"vllm": "unknown-tensor"},
            served=False,
        ),
        "hidden_size is missing": Damage("medusa", config(hidden_size=None), {"vllm": "sizes"}, served=False),
        "hidden_size is wrong": Damage("medusa", config(hidden_size=8), {"vllm": "shapes"}, served=False),
        "a setting that is renamed": Damage(
            "medusa", config(num_attention_heads=1), {"vllm": "renamed-settings"}, served=False
        ),
        "truncated_vocab_size": Damage(
            "medusa", config(truncated_vocab_size=8), {"vllm": "truncated-vocabulary"}, served=False
        ),
        "rows of another vocabulary": Damage(
            "medusa",
            tensors(lambda t: t.update({"lm_heads.0.weight": t["lm_heads.0.weight"][:-1]})),
            {"vllm": "vocabulary"},
            served=False,
        ),
    }  # fmt: skip
    lm = {
        "another vocabulary": Damage(
            "causal", config(vocab_size=17), of_lm("vocabulary"), served=False
        ),
        "a norm is missing": Damage(
            "causal", drop("model.norm.weight"), of_lm("missing-tensor"), served=False
        ),
        "an extra tensor": Damage(
            "causal", add(model__extra__weight="model.norm.weight"), of_lm("unknown-tensor"), served=False
        ),
        "no tokenizer": Damage(
            "causal", lambda folder: (folder / "tokenizer_config.json").unlink(), of_lm("tokenizer"), served=False
        ),
        "another width (LM)": Damage(
            "causal", config(intermediate_size=8), of_lm("shapes"), served=False
        ),
        "tied, with a matrix of its own": Damage(
            "causal",
            both(config(tie_word_embeddings=True), add(lm_head__weight="model.embed_tokens.weight")),
            of_lm("tied"),
            served=False,
        ),
        "not a number (LM)": Damage("causal", nan("model.norm.weight"), of_lm("finite"), served=False),
        "integers for weights (LM)": Damage(
            "causal", cast("model.norm.weight", torch.int8), of_lm("floating"), served=False
        ),
        "another dtype is said (LM)": Damage("causal", config(dtype="float64"), of_lm("dtype"), served=False),
        "no rope keys (LM)": Damage(
            "causal", config(rope_parameters=None, rope_theta=None), of_lm("rope"), served=False
        ),
    }  # fmt: skip
    return e3 | e1 | md | lm


@dataclass
class Settings:
    drafts: str = "outputs/compare/drafts"
    """Folder with good drafts by family: eagle3, eagle1, medusa."""
    target: str = "assets/target"
    python: str = ""
    """Interpreter that has vLLM; empty: as in scripts/referee.py."""
    only: list[str] = field(default_factory=list)
    """Names of damages; empty: those that say something in vLLM."""
    tasks: list[Task] = field(
        default_factory=lambda: [Task("code", limit=2), Task("prose", limit=2), Task("arithmetic", limit=2)]
    )  # fmt: skip
    k: int = 4
    max_new_tokens: int = 32
    out: str = ""
    """File for the JSON, written anew after each draft; drafts that it holds are not served again."""


def copy_of(draft: str, out: Path) -> None:
    """The files of a draft that engines read, in the layout that is saved today."""
    if family_of(draft) == "causal":
        out.mkdir(parents=True)
        for pattern in ("*.json", "*.safetensors"):
            for file in Path(draft).glob(pattern):
                shutil.copyfile(file, out / file.name)
    else:
        formats.write(out, *export.flat(published.read(draft)))
        export.facts_of(draft, read_facts(draft), out)


def outcome(judge: dict[str, Any]) -> dict[str, Any]:
    """What vLLM accepts, or what it says instead."""
    if "error" in judge:
        return {"vllm": "refused", "says": " ".join(judge["error"].split())[:300]}
    total = referee.total(judge["answers"])
    return {
        "vllm": "served",
        "version": judge["vllm"],
        **total,
        "tau": 1 + total["accepted"] / total["rounds"],
        "acceptance_rate": total["accepted"] / total["drafted"],
    }


def rows_of(file: str, sizes: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of an earlier run of these sizes, which goes on."""
    if not file or not Path(file).is_file():
        return []
    held = runs.read_json(Path(file))
    return held["rows"] if {key: held.get(key) for key in sizes} == sizes else []


def record(file: str, sizes: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    if file:
        result = {**sizes, "rows": rows, **runs.provenance()}
        runs.write_atomically(Path(file), json.dumps(result, indent=1) + "\n")


def main(s: Settings) -> None:
    target = load_target(s.target, "cpu")
    prompts = [item.prompt_ids for task in s.tasks for item in load_items(task, target)]
    context = referee.room(target, prompts, s.k, s.max_new_tokens)
    known = damages(target.decoder.config.num_hidden_layers)
    names = s.only or [name for name, damage in known.items() if damage.served]
    strange = [name for name in names if name not in known]
    if strange:
        raise UserError(f"no damage {strange[0]!r}: give some of {', '.join(known)}")
    todo = [(family, "none") for family in dict.fromkeys(known[name].family for name in names)]
    todo += [(known[name].family, name) for name in names]
    sizes = {"k": s.k, "prompts": len(prompts), "max_new_tokens": s.max_new_tokens}
    rows = rows_of(s.out, sizes)
    todo = [pair for pair in todo if pair not in [(row["family"], row["damage"]) for row in rows]]
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / f"draft{i}" for i in range(len(todo))]
        for folder, (family, name) in zip(folders, todo, strict=True):
            copy_of(f"{s.drafts}/{family}", folder)
            if name != "none":
                known[name].edit(folder)
        jobs = [
            vllm_engine.job(
                s.target,
                prompts,
                speculative=vllm_engine.speculative(str(folder), s.k),
                max_new_tokens=s.max_new_tokens,
                max_model_len=context,
            )
            for folder in folders
        ]
        judged = vllm_engine.answers(s.python, jobs) if jobs else iter(())
        for folder, (family, name), judge in zip(folders, todo, judged, strict=True):
            seen = findings(str(folder), "vllm", target=s.target)
            said = [[f.rule, f.effect, f.what] for f in seen if f.rule != "changed-since-training"]
            rows.append({"family": family, "damage": name, "checker": said, **outcome(judge)})
            record(s.out, sizes, rows)
    record(s.out, sizes, rows)
    table = Table("family", "damage", "checker", "vLLM", "τ", "by position")
    for row in rows:
        rules = ", ".join(dict.fromkeys(rule for rule, _, _ in row["checker"])) or "–"
        tau = f"{row['tau']:.3f}" if "tau" in row else "–"
        positions = str(row.get("by_position", ""))
        table.add_row(row["family"], row["damage"], rules, row["vllm"], tau, positions)
    Console(stderr=True).print(table)


if __name__ == "__main__":
    run_command(main, Settings, __doc__)
