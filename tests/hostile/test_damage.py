"""Targets, drafts, samples, checkpoints, reports and tuned settings that are damaged or not what they say they are."""
# ruff: noqa: E501 (a case is one row of its table)

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hostile.case import Case, Prepare, check, params
from tests.hostile.files import (
    change_bytes,
    change_json,
    change_tensors,
    copy,
    drop_key,
    edit_json,
    empty,
    flip,
    remove,
    step,
    truncate,
    write,
)
from tests.hostile.lab import BASE, Lab, call

WEIGHTS = "model.safetensors"
DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "9" * 5000
OTHER_NUMBERS = b"".join(
    json.dumps({"number": number, "finish_reason": "eos", "text": f"no {number}"}).encode() + b"\n"
    for number in (-1, 0, 99)
)
"""Lines of a log of prompts: two whose number was not asked for, and one whose number it has already."""


def first_as_nan(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = sorted(tensors)[0]
    return tensors | {name: torch.full_like(tensors[name], float("nan"))}


def without_first(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensors[name] for name in sorted(tensors)[1:]}


def without_last(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the final norm; the first tensor is the LM head, in whose place the embedding serves (tied_heads)."""
    return {name: tensors[name] for name in sorted(tensors)[:-1]}


def shifted(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: value + 0.5 if value.is_floating_point() else value for name, value in tensors.items()
    }


def narrower(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value[..., :-1].contiguous() for name, value in tensors.items()}


class Exploit:
    """Unpickling it would write a file into the working folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("owned", "w")


def pickled(folder: str) -> Prepare:
    """The weights of the folder as a pickle that runs code, instead of safetensors."""

    def action(lab: Lab, tmp: Path) -> None:
        (tmp / folder / WEIGHTS).unlink()
        for name in ("pytorch_model.bin", "medusa_lm_head.pt"):
            (tmp / folder / name).write_bytes(pickle.dumps({"a": Exploit()}, protocol=2))

    return step("pickled weights", action)


def remote_code(folder: str) -> Prepare:
    """A config that asks for code of its own, which would write a file."""

    def action(lab: Lab, tmp: Path) -> None:
        config = tmp / folder / "config.json"
        own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {"auto_map": own, "model_type": "own"})
        )
        (tmp / folder / "own.py").write_text(
            "open('owned', 'w')\nclass OwnConfig: ...\nclass OwnModel: ...\n"
        )

    return step("remote code", action)


def permuted_vocabulary(folder: str) -> Prepare:
    """tokenizer.json in which two tokens have each other's id."""

    def swap(values: Any) -> Any:
        vocab = values["model"]["vocab"]
        a, b = sorted(vocab)[-2:]
        vocab[a], vocab[b] = vocab[b], vocab[a]
        return values

    return change_json(f"{folder}/tokenizer.json", swap, "permuted")


TARGETS: list[tuple[Prepare, str]] = [
    (remove("target/config.json"), "config.json"),
    (remove("target/model.safetensors"), "target"),
    (remove("target/tokenizer.json"), "tokenizer"),
    (truncate("target/model.safetensors"), "target"),
    (empty("target/model.safetensors"), "target"),
    (change_tensors("target/model.safetensors", first_as_nan, "NaN"), "target"),
    (change_tensors("target/model.safetensors", without_last, "without one"), "weights"),
    (change_tensors("target/model.safetensors", narrower, "narrower"), "weights"),
    (pickled("target"), "safetensors"),
    (remote_code("target"), "target"),
    (empty("target/config.json"), "config.json"),
    (write("target/config.json", DEEP, "config deep"), "config.json"),
    (write("target/config.json", "[1]", "config list"), "config.json"),
    (write("target/config.json", b"\xff\xfe{}", "config no UTF-8"), "config.json"),
    (write("target/config.json", f'{{"model_type": "llama", "vocab_size": {DIGITS}}}', "digits"), "config.json"),
    (edit_json("target/config.json", num_hidden_layers=-1), "num_hidden_layers"),
    (edit_json("target/config.json", num_hidden_layers=0), "num_hidden_layers"),
    (edit_json("target/config.json", num_hidden_layers=3), "weights"),
    (edit_json("target/config.json", num_hidden_layers="two"), "num_hidden_layers"),
    (edit_json("target/config.json", num_attention_heads=0), "target"),
    (edit_json("target/config.json", hidden_size=-32), "hidden_size"),
    (edit_json("target/config.json", vocab_size=0), "vocab_size"),
    (edit_json("target/config.json", vocab_size=None), "vocab_size"),
    (edit_json("target/config.json", vocab_size=10), "config.json"),
    (edit_json("target/config.json", max_position_embeddings=0), "max_position_embeddings"),
    (edit_json("target/config.json", max_position_embeddings=-5), "max_position_embeddings"),
    (edit_json("target/config.json", model_type="nonsense", architectures=["Nonsense"]), "nonsense"),
    (edit_json("target/config.json", model_type="t5", architectures=["T5Model"]), "target"),
    (edit_json("target/config.json", model_type=3), "model type"),
    (drop_key("target/config.json", "model_type"), "model_type"),
    (edit_json("target/config.json", hidden_act="nonsense"), "target"),
    (edit_json("target/config.json", rope_parameters={"rope_type": "nonsense"}), "target"),
    (edit_json("target/config.json", quantization_config={"quant_method": "gptq", "bits": 4}), "target"),
    (empty("target/tokenizer.json"), "tokenizer"),
    (write("target/tokenizer.json", DEEP, "tokenizer deep"), "tokenizer"),
    (write("target/tokenizer.json", "{}", "tokenizer without fields"), "tokenizer"),
    (write("target/chat_template.jinja", "{% for x in %}", "template broken"), "template"),
    (write("target/chat_template.jinja", "{{ messages.__class__.__mro__[1].__subclasses__() }}", "template escapes"), "template"),
    (edit_json("target/generation_config.json", eos_token_id="x"), "eos_token_id"),
    (edit_json("target/generation_config.json", eos_token_id=[-1]), "eos_token_id"),
    (edit_json("target/generation_config.json", eos_token_id=99999), "eos_token_id"),
]  # fmt: skip

DRAFTS: list[tuple[str, Prepare, str]] = [
    ("causal", remove("causal/config.json"), "causal"),
    ("causal", remove("causal/model.safetensors"), "causal"),
    ("causal", truncate("causal/model.safetensors"), "causal"),
    ("causal", change_tensors("causal/model.safetensors", first_as_nan, "NaN"), "causal"),
    ("causal", permuted_vocabulary("causal"), "tokenizer"),
    ("causal", pickled("causal"), "safetensors"),
    ("causal", remote_code("causal"), "causal"),
    ("causal", write("causal/draftsmith.json", "{", "metadata cut"), "draftsmith.json"),
    ("causal", write("causal/draftsmith.json", "[]", "metadata list"), "draftsmith.json"),
    ("causal", write("causal/draftsmith.json", DEEP, "metadata deep"), "draftsmith.json"),
    ("causal", write("causal/draftsmith.json", b"\xff", "metadata no UTF-8"), "draftsmith.json"),
    ("causal", edit_json("causal/draftsmith.json", family="nonsense"), "nonsense"),
    ("causal", edit_json("causal/draftsmith.json", family=3), "family"),
    ("causal", edit_json("causal/draftsmith.json", family="eagle3"), "causal"),
    ("causal", edit_json("causal/draftsmith.json", tokenizer_hash="0000000000000000"), "tokenizer"),
    ("causal", write("causal/draft_vocab.json", '{"ids": [9, 3]}', "ids that fall"), "draft_vocab.json"),
    ("causal", write("causal/draft_vocab.json", '{"ids": [3, 99999]}', "ids too high"), "draft_vocab.json"),
    ("causal", edit_json("causal/config.json", num_hidden_layers=1), "not part of the LlamaForCausalLM"),
    ("eagle3", truncate("eagle3/model.safetensors"), "eagle3"),
    ("eagle3", change_tensors("eagle3/model.safetensors", without_first, "without one"), "eagle3"),
    ("eagle3", change_tensors("eagle3/model.safetensors", narrower, "narrower"), "eagle3"),
    ("eagle3", pickled("eagle3"), "eagle3"),
    ("eagle3", remote_code("eagle3"), "eagle3"),
    ("eagle3", edit_json("eagle3/config.json", hidden_size=-1), "eagle3"),
    ("eagle3", edit_json("eagle3/config.json", draft_vocab_size=99999), "eagle3"),
    ("eagle3", edit_json("eagle3/config.json", eagle_aux_hidden_state_layer_ids=[98, 99]), "eagle3"),
    ("eagle3", edit_json("eagle3/config.json", eagle_aux_hidden_state_layer_ids="all"), "eagle3"),
    ("eagle3", edit_json("eagle3/config.json", num_hidden_layers=7), "eagle3"),
    ("eagle3", write("eagle3/config.json", "[]", "config list"), "eagle3"),
    ("eagle3", write("eagle3/config.json", DEEP, "config deep"), "config.json"),
    ("eagle3", drop_key("eagle3/draftsmith.json", "tokenizer_hash"), "tokenizer_hash"),
    ("medusa", edit_json("medusa/config.json", num_heads=99), "medusa"),
    ("medusa", edit_json("medusa/config.json", num_heads=0), "medusa"),
    ("medusa", edit_json("medusa/config.json", vocab_size=7), "medusa"),
    ("medusa", edit_json("medusa/config.json", hidden_size="wide"), "medusa"),
]  # fmt: skip

CHANGED: list[tuple[str, Prepare]] = [
    ("causal", flip("causal/model.safetensors")),
    ("causal", change_tensors("causal/model.safetensors", shifted, "shifted")),
    ("causal", write("causal/draft_vocab.json", '{"ids": [0, 40, 70]}', "ids added")),
    ("causal", edit_json("causal/draftsmith.json", draft_sha256="0" * 64)),
    ("medusa", flip("medusa/model.safetensors")),
    ("eagle3", change_tensors("eagle3/model.safetensors", shifted, "shifted")),
]
"""Drafts that decode, but are not the ones that their draftsmith.json is about."""

MANIFEST = "samples/manifest.json"
SHARD = "samples/shards/*.parquet"
SAMPLES: list[tuple[Prepare, str]] = [
    (remove(SHARD), "shard"),
    (truncate(SHARD), ".parquet"),
    (empty(SHARD), ".parquet"),
    (change_bytes(SHARD, lambda data: data[:100] + b"\0" * 40 + data[140:], "holed"), ".parquet"),
    (remove("samples/shards"), "samples"),
    (remove(MANIFEST), "manifest.json"),
    (empty(MANIFEST), "manifest.json"),
    (write(MANIFEST, "[]", "manifest list"), "manifest.json"),
    (write(MANIFEST, DEEP, "manifest deep"), "manifest.json"),
    (write(MANIFEST, b"\xff{}", "manifest no UTF-8"), "manifest.json"),
    (edit_json(MANIFEST, tokenizer_hash="0000000000000000"), "tokenizer"),
    (edit_json(MANIFEST, tokenizer_hash=3), "tokenizer"),
    (drop_key(MANIFEST, "tokenizer_hash"), "manifest.json"),
    (edit_json(MANIFEST, counts="many"), "manifest.json"),
    (drop_key(MANIFEST, "counts"), "manifest.json"),
]

MEASURED = [
    ("empty", "", "empty"),
    ("cut", '{"schema": 1', "not"),
    ("list", "[]", "report"),
    ("number", "3", "report"),
    ("null", "null", "report"),
    ("deep", DEEP, "r.json"),
    ("digits", f'{{"schema": {DIGITS}}}', "r.json"),
    ("no UTF-8", b'{"schema": "\xff"}', "r.json"),
    ("other schema", '{"schema": 99, "target": "t", "baseline": {}, "methods": []}', "r.json"),
    ("schema only", '{"schema": 1}', "r.json"),
    (
        "methods text",
        '{"schema": 1, "target": {"name": "t"}, "baseline": {}, "methods": "none"}',
        "r.json",
    ),
    ("NaN", '{"schema": NaN, "target": "t", "baseline": {}, "methods": []}', "r.json"),
]
"""(what, content, what the message names) of a report.json or tuned.json that is none."""
READERS = {
    "eval/report.py": "--folder $lab/report --tuned $tmp/r.json",
    "eval/advise.py": "--report $tmp/r.json",
    "eval/advise.py --tuned": "--tuned $tmp/r.json",
    "scripts/publish.py": "--report $tmp/r.json",
    "scripts/publish.py --tuned": "--tuned $tmp/r.json",
    "scripts/publish.py --referee": "--referee $tmp/r.json",
    "scripts/readme_table.py": "--report $tmp/r.json",
}
PAGE = write("page.md", "<!-- table: begin -->\n<!-- table: end -->\n")
FEW = ("list", "deep", "schema only", "methods text")

OTHER_TARGET = change_json(
    "tuned.json",
    lambda x: x | {"target": {"name": "other", "tokenizer": "0" * 16}},
    "of another target",
)

CHECKPOINTS = [
    Case("eval/advise.py", "--tuned $tmp/tuned.json", "target", (copy("tuned/tuned.json", "tuned.json"), OTHER_TARGET)),
    Case("eval/report.py", "--tuned $tmp/tuned.json", "target", (copy("report"), copy("tuned/tuned.json", "tuned.json"), OTHER_TARGET)),
    Case("train/distill.py", "--overwrite false --resume true --loop.steps 6", "checkpoint", (truncate("out/checkpoints/*/model.safetensors"), truncate("out/checkpoints/step-000004/model.safetensors"))),
    Case("train/distill.py", "--overwrite false --resume true --loop.steps 6", "contents.json", (write("out/checkpoints/step-000002/contents.json", "[]"), write("out/checkpoints/step-000004/contents.json", "[]"))),
    Case("train/distill.py", "--overwrite false --resume true --loop.steps 6 --target $lab/stranger", "tokenizer"),
    Case("train/distill.py", "--overwrite false --resume true --draft.layers '[0]' --draft.init ''", "checkpoint"),
    Case("train/distill.py", "--overwrite false --resume true --draft.init '' --draft.family medusa --loop.steps 6", "checkpoint"),
    Case("scripts/track_report.py", "--run $tmp/causal", "run.yaml", (copy("causal"), write("causal/run.yaml", "loop: [", "run.yaml cut"))),
    Case("scripts/track_report.py", "--run $tmp/causal", "loop", (copy("causal"), write("causal/run.yaml", "loop: 3\n", "loop is 3"))),
    Case("scripts/track_report.py", "--run $tmp/causal", "run.yaml", (copy("causal"), remove("causal/run.yaml"))),
    Case("scripts/track_report.py", "--report $tmp/report", "report.html", (copy("causal"), copy("report"), remove("report/report.html"))),
]  # fmt: skip


def cases() -> list[Case]:
    generate = [
        Case("decode/generate.py", "--target $tmp/target", says, (copy("target"), damage))
        for damage, says in TARGETS
    ]
    drafts = []
    for name, damage, says in DRAFTS:
        steps = (copy(name), damage)
        arguments = f"--draft $tmp/{name} --k 2"
        drafts.append(Case("decode/generate.py", arguments, says, steps, warns=True))
        methods = f"[{{name: {name}, draft: $tmp/{name}, k: 2}}]"
        if damage.__name__.split()[-1] in (
            "flipped",
            "shifted",
            "list",
            "permuted",
            "cut",
            "'nonsense'}",
        ):
            drafts.append(Case("eval/run.py", f"--methods '{methods}'", says, steps, warns=True))
            drafts.append(Case("scripts/publish.py", f"--draft $tmp/{name}", says, steps))
    samples = []
    for damage, says in SAMPLES:
        steps = (copy("samples"), damage)
        samples.append(Case("train/distill.py", "--data $tmp/samples", says, steps))
        samples.append(Case("train/doctor.py", "--data $tmp/samples", says, steps))
        samples.append(Case("scripts/publish.py", "--draft '' --samples $tmp/samples", says, steps))
    measured = []
    for reader, arguments in READERS.items():
        for what, content, says in MEASURED:
            if reader == "eval/advise.py" or what in FEW:
                command, steps = reader.split()[0], (write("r.json", content, what), PAGE)
                measured.append(Case(command, arguments, "r.json" if what in FEW else says, steps))
    changed = [
        Case("scripts/publish.py", f"--draft $tmp/{name}", "draftsmith.json", (copy(name), damage))
        for name, damage in CHANGED
    ]
    return [*generate, *drafts, *changed, *samples, *measured, *CHECKPOINTS]


@pytest.mark.parametrize("case", params(*cases()))
def test_damage_is_seen(case: Case, lab: Lab, tmp_path: Path) -> None:
    check(case, lab, tmp_path)


@pytest.mark.parametrize(
    ("command", "name", "damage"),
    [*(("decode/generate.py", *changed) for changed in CHANGED), ("eval/run.py", *CHANGED[0])],
)
def test_a_changed_draft_is_said(
    command: str, name: str, damage: Prepare, lab: Lab, tmp_path: Path
) -> None:
    """Catches results that are put down to the draft that was trained: its weights or its config are others."""
    copy(name)(lab, tmp_path)
    damage(lab, tmp_path)
    draft = tmp_path / name
    given = f"--draft {draft} --k 2"
    if command == "eval/run.py":
        given = f"--methods '[{{name: {name}, draft: {draft}, k: 2}}]'"
    done = call(command, lab.words(f"{BASE[command]} {given}", tmp_path), tmp_path).ok()
    lines = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert any("draftsmith.json" in line for line in lines), done.err


LOGS: list[tuple[Prepare, bool]] = [
    (truncate("out/written.jsonl"), False),
    (empty("out/written.jsonl"), False),
    (remove("out/written.jsonl"), False),
    (remove("out/prompts.jsonl"), False),
    (change_bytes("out/written.jsonl", lambda data: b"\xff" + data[1:], "no UTF-8"), True),
    (change_bytes("out/written.jsonl", lambda data: DEEP.encode() + b"\n" + data, "deep"), True),
    (change_bytes("out/written.jsonl", lambda data: b'{"number": "0"}\n' + data, "other fields"), True),
    (change_bytes("out/written.jsonl", lambda data: data + OTHER_NUMBERS, "other numbers"), False),
]  # fmt: skip
"""What happens to the log of train/write_prompts.py, and whether a warning names it."""


@pytest.mark.parametrize(("damage", "warns"), LOGS, ids=[damage.__name__ for damage, _ in LOGS])
def test_damaged_prompts_are_written_again(
    damage: Prepare, warns: bool, lab: Lab, tmp_path: Path
) -> None:
    """Catches prompts that a damaged log loses, changes or adds; the log as it was is kept."""
    copy("written", "out")(lab, tmp_path)
    damage(lab, tmp_path)
    log = tmp_path / "out" / "written.jsonl"
    before = log.read_bytes() if log.exists() else b""
    words = lab.words(f"{BASE['train/write_prompts.py']} --resume true", tmp_path)
    done = call("train/write_prompts.py", words, tmp_path).ok()
    wanted = (lab.folder / "written" / "prompts.jsonl").read_bytes()
    assert (tmp_path / "out" / "prompts.jsonl").read_bytes() == wanted
    assert wanted.count(b"\n") > 1
    said = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert [str(log) in line for line in said] == [True] * warns
    kept = log.with_name("written.jsonl.damaged")
    assert (kept.read_bytes() if warns else kept.exists()) == (before if warns else False)
