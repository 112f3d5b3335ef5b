"""Nothing leaks: secrets of every form in every field of every input are left out, or the publishing is refused."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from decode.checkpoints.draft_folder import METADATA_FILE, DraftMetadata
from decode.common.errors import UserError
from decode.common.files import read_json
from decode.common.published import PRIVATE, Name, Private, Word, published
from decode.common.ranges import OneOf
from decode.common.target_record import ModelFingerprint
from decode.common.typed_json import arms_of, fields_of
from tests import drafts
from tests.planted_secrets import MARKED, SECRETS, secret_part
from tests.worlds import ROOT
from train.data import sample_store
from train.data.manifest import Manifest, read_manifest, write_manifest
from train.data.mixture import DataManifests
from train.hub import publish, redaction
from train.hub.evidence import Evidence
from train.settings.training import HubLabels
from train.trainer.settings import DistillConfig

PUBLISHED: dict[str, Any] = {
    "draftsmith.json": DraftMetadata,
    "training": DistillConfig,
    "data_manifest": DataManifests,
    **{
        f"{field.name}.json": arms_of(field.keys[field.name])[0][0] for field in fields_of(Evidence)
    },
    "manifest.json": Manifest,
}
LEFT_OUT = (
    "features", "placement", "states", "tracker", "wandb", "project", "publish", "out", "resume", "allow_changed",
    "overwrite", "dry_run",
)  # fmt: skip
"""Settings of train/distill.py that say nothing of the draft and much of its maker."""


def documents(kind: Any, planted: str) -> Iterator[Any]:
    """For every field of the type a document that has only this field, with `planted` in it; and for every mapping one
    that has `planted` as a key, and one with an unknown field."""
    arms: list[Any] = []
    for arm, marks in arms_of(kind):
        groups = [mark for mark in marks if isinstance(mark, OneOf)]
        arms += [cls for group in groups for cls in group.classes.values()] or [arm]
    for arm in arms:
        items = get_args(arm)
        if get_origin(arm) is dict:
            yield {planted: 1.0}
            yield from ({"a": inner} for inner in documents(items[1], planted))
        elif dataclasses.is_dataclass(arm):
            yield {planted: 1.0}
            yield {"unknown": planted}
            for key, kind in [pair for field in fields_of(arm) for pair in field.keys.items()]:
                yield from ({key: inner} for inner in documents(kind, planted))
        elif get_origin(arm) in (list, tuple):
            yield from ([inner] for inner in documents(items[0], planted))
        else:
            yield planted


def try_to_publish(document: Any, kind: Any, file: str) -> tuple[Any, str]:
    """(what is published of the document, the message with which it is refused), one of them empty."""
    try:
        return published(document, kind, file), ""
    except UserError as error:
        return None, str(error)


@pytest.mark.parametrize("file", PUBLISHED)
def test_no_field_lets_a_secret_pass(file: str) -> None:
    """Catches a field of free text, a key that is published, a message that repeats the secret."""
    tried, passed = 0, []
    for name, secret in SECRETS.items():
        for document in documents(PUBLISHED[file], secret):
            tried += 1
            chosen, line = try_to_publish(document, PUBLISHED[file], file)
            assert line == "" or (file in line and "\n" not in line)
            if secret_part(secret) in json.dumps([chosen, line]):
                passed.append((name, document))
    assert passed == []
    assert tried > 29 * 20


@dataclasses.dataclass
class Careless:
    name: Name
    log: Private[str]
    rows: list[dict[Word, str | None]]


def texts_without_a_kind(kind: Any, file: str) -> set[str]:
    found = set()
    for document in documents(kind, "a"):
        try:
            try_to_publish(document, kind, file)
        except TypeError as error:
            found.add(str(error).partition(": its field")[0])
    return found


def test_every_text_says_what_it_holds() -> None:
    """Catches a new field of free text in a published type, which stops whoever publishes a file that has it."""
    assert [texts_without_a_kind(kind, file) for file, kind in PUBLISHED.items()] == [set()] * len(
        PUBLISHED
    )
    assert texts_without_a_kind(Careless, "x.json") == {"x.json: rows[0].a"}


def test_private_values_do_not_pass() -> None:
    """Catches paths, homes, hosts and pages of W&B in the fields of names and folders."""
    private = {
        "/home/alice/models/llama": "llama", "~/alice/llama": "llama",
        "../../home/alice/llama": "llama", "C:\\Users\\alice\\llama": "llama",
        "s3://company/alice/llama": "llama", "node7.company.org:/data/alice/llama": "llama",
        "https://wandb.ai/alice/project/runs/ab12": "ab12", "org/name": "org/name",
        "outputs/drafts/x": "outputs/drafts/x", str(Path.cwd() / "outputs" / "x"): "outputs/x",
    }  # fmt: skip
    for value, shown in private.items():
        facts = {"target": {"name": value}, "argv": [value], "wandb_url": value, "host": value}
        assert published(facts, DraftMetadata, "x") == {"target": {"name": shown}}


@pytest.mark.parametrize("content", [3, "x", True, float("nan"), [1], {"a": 1}, [["x"]]])
def test_fields_of_another_type_are_refused(content: Any) -> None:
    """Catches a number that is a text, a list that is a mapping; a message without the field's name."""
    wrong = 0
    for file in ("report.json", METADATA_FILE):
        for field in fields_of(PUBLISHED[file]):
            _, line = try_to_publish({field.name: content}, PUBLISHED[file], file)
            assert line == "" or f"{file}: {field.name}" in line
            wrong += line != ""
    assert wrong >= 10


def test_commits_and_checksums_are_shortened_unless_they_are_the_drafts_own() -> None:
    """Catches a key of 40 or 64 digits in a field for commits."""
    long = "0123456789abcdef" * 4
    facts = {"git": f"{long[:40]}+dirty", "draft_sha256": long, "tokenizer_hash": long[:16]}
    chosen = published(facts, DraftMetadata, "x", {long})
    assert chosen == {
        "git": "0123456789ab+dirty", "draft_sha256": long, "tokenizer_hash": long[:16],
    }  # fmt: skip
    target = {"target": {"name": "org/t", "revision": long[:40]}}
    assert published(target, DraftMetadata, "x")["target"]["revision"] == long[:12]


def test_a_pinned_target_stays_pinned(tmp_path: Path) -> None:
    """Catches a revision that is shortened although training asked for it, and one published that it did not."""
    commit = "0123456789abcdef0123" * 2
    for number, asked in enumerate((commit, None)):
        folder = drafts.draft(tmp_path / f"d{number}", target={"name": "org/t", "revision": commit})
        facts = read_json(folder / METADATA_FILE)
        facts["training"]["revision"] = asked
        (folder / METADATA_FILE).write_text(json.dumps(facts))
        out = publish.build_draft_folder(
            folder, Evidence(), "me/x", HubLabels(), tmp_path / f"out{number}", DistillConfig
        ).path
        shown = (out / "serving" / "vllm.sh").read_text()
        assert (commit in shown) is (asked is not None)
        assert f"--revision {commit[:12]}" in shown


@pytest.mark.parametrize(
    ("file", "kind", "missing"),
    [
        ("quickstart.json", PUBLISHED["report.json"], {"argv", "settings"}),
        ("assisted.json", PUBLISHED["report.json"], {"argv", "settings"}),
        ("eagles_smollm2.json", PUBLISHED["report.json"], {"argv", "settings"}),
        ("tuned.json", PUBLISHED["tuned.json"], {"argv", "settings", "refused"}),
        ("referee_eagle3.json", PUBLISHED["referee.json"], {"argv"}),
    ],
)
def test_real_reports_are_published_whole(file: str, kind: Any, missing: set[str]) -> None:
    """Catches a field that eval writes and publishing forgets, and a false alarm at a real report."""
    report = read_json(ROOT / "docs" / "results" / file)
    assert set(lost(report, published(report, kind, file))) == missing


def lost(before: Any, after: Any) -> Iterator[str]:
    """Names of the fields that are in `before` alone."""
    if isinstance(before, dict):
        yield from before.keys() - after.keys()
        for key in before.keys() & after.keys():
            yield from lost(before[key], after[key])
    elif isinstance(before, list):
        for a, b in zip(before, after, strict=True):
            yield from lost(a, b)


def test_private_training_settings_stay_private() -> None:
    """Catches a setting of its maker's that loses its mark."""
    private = {field.name for field in fields_of(DistillConfig) if PRIVATE in field.marks}
    assert private == set(LEFT_OUT)


# ---- whole folders ----


def test_unknown_fields_reach_no_file(tmp_path: Path) -> None:
    """Catches a card, a figure, a table or a copy that is made from what is not published: one folder, every secret in
    an unknown field of every input, in every private setting, in the names and texts of files that are left out."""
    extra = {f"field {i}": secret for i, secret in enumerate(SECRETS.values())}
    folder = drafts.draft(tmp_path / "d")
    facts = read_json(folder / METADATA_FILE)
    facts |= extra | {"argv": list(SECRETS.values()), "wandb": extra}
    facts["training"] |= extra | dict.fromkeys(LEFT_OUT, MARKED["GitHub"])
    facts["data_manifest"] |= extra
    facts["hardware"] |= {"hostname": MARKED["GitHub"]}
    (folder / METADATA_FILE).write_text(json.dumps(facts))
    (folder / "README.md").write_text("\n".join(SECRETS.values()))
    (folder / f"{MARKED['GitHub']}.txt").write_text("x")
    save_file({"a": torch.ones(1)}, folder / f"model-{MARKED['GitHub']}.safetensors")
    sha = facts["draft_sha256"]
    report = drafts.report(sha) | extra | {"settings": "\n".join(SECRETS.values())}
    for entry in report["methods"]:
        entry |= extra
    result = publish.build_draft_folder(
        folder,
        drafts.evidence(
            report=report,
            referee=drafts.referee(sha) | extra,
            tuned=drafts.tuned(sha, {"all": 3}) | extra | {"refused": extra},
        ),
        "me/x",
        HubLabels(),
        tmp_path / "out",
        DistillConfig,
    )
    shown = " ".join(map(str, result.left_out))
    for path in result.path.rglob("*"):
        shown += str(path) + (path.read_bytes().decode(errors="replace") if path.is_file() else "")
    assert [name for name, secret in SECRETS.items() if secret_part(secret) in shown] == []


def test_a_leak_is_told_by_its_input_and_field(tmp_path: Path) -> None:
    """Catches a secret of the report that is called one of README.md, which is made from it; nothing is written."""
    folder = drafts.draft(tmp_path / "d")
    report = drafts.report(drafts.sha_of(folder))
    report["methods"][2]["task"] = MARKED["GitHub"]
    with pytest.raises(UserError, match=r"^report.json: methods\[2\].task holds .* a GitHub token"):
        publish.build_draft_folder(
            folder, drafts.evidence(report=report), "me/x", HubLabels(), tmp_path / "out",
            DistillConfig,
        )  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]


@pytest.mark.parametrize("setting", ["base_model", "license", "dataset", "repo"])
def test_names_on_the_command_line_hold_no_secret(tmp_path: Path, setting: str) -> None:
    """Catches a token pasted as a name, and an error that repeats it."""
    folder = drafts.draft(tmp_path / "d")
    for secret in SECRETS.values():
        value = f"me/{secret}"
        labels = HubLabels() if setting == "repo" else HubLabels(**{setting: value})
        repo = value if setting == "repo" else "me/x"
        with pytest.raises(UserError) as caught:
            publish.build_draft_folder(
                folder, Evidence(), repo, labels, tmp_path / "out", DistillConfig
            )
        assert secret_part(secret) not in str(caught.value)


def model_files(secret: str) -> Iterator[tuple[str, Any]]:
    """(file name, JSON or text) with the secret in each kind of place of each file that is copied."""
    yield "config.json", {"model_type": secret}
    yield "config.json", {"rope_parameters": {"rope_type": secret}}
    yield "config.json", {"architectures": ["x", secret]}
    yield "config.json", {secret: True}
    yield "generation_config.json", {"notes": secret}
    yield "tokenizer_config.json", {"eos_token": secret}
    yield "tokenizer_config.json", {"chat_template": f"{{{{ x }}}} {secret} <|end|>"}
    yield "tokenizer_config.json", {"added_tokens_decoder": {"1": {"content": secret}}}
    yield "special_tokens_map.json", {"pad_token": {"content": secret}}
    yield "model.safetensors.index.json", {"weight_map": {secret: "model.safetensors"}}
    yield "tokenizer.json", {"added_tokens": [{"content": secret}], "model": {"vocab": {}}}
    yield "chat_template.jinja", f"{{{{ x }}}} {secret} <|end|>"


def test_no_model_file_lets_a_secret_pass(tmp_path: Path) -> None:
    """Catches a field of config.json, a template, a special token or a tensor's name with a secret in it."""
    passed = []
    for name, secret in SECRETS.items():
        cases = list(model_files(secret))
        if name in MARKED:  # in a vocabulary a random word is a token as any other
            cases += [
                ("tokenizer.json", {"model": {"vocab": {secret: 0}}}),
                ("vocab.json", {secret: 0}),
                ("added_tokens.json", {secret: 0}),
                ("merges.txt", f"a b\n{secret} c\n"),
            ]
        for file, content in cases:
            path = tmp_path / file
            path.write_text(content if isinstance(content, str) else json.dumps(content))
            passed += refused(tmp_path, name, secret, file)
            path.unlink()
        for tensors, metadata in (({"a": 1}, {"from": secret}), ({secret: 1}, {"format": "pt"})):
            save_file(
                {key: torch.ones(1) for key in tensors}, tmp_path / "model.safetensors", metadata
            )
            passed += refused(tmp_path, name, secret, "model.safetensors")
        (tmp_path / "model.safetensors").unlink()
    assert passed == []


def refused(folder: Path, name: str, secret: str, file: str) -> list[tuple[str, str]]:
    """[] if the folder is refused with a line that names the file and not the secret."""
    line = ""
    try:
        redaction.check_folder(folder)
    except UserError as error:
        line = str(error)
    return [] if file in line and secret_part(secret) not in line else [(name, file)]


@pytest.mark.parametrize("model", ["target", "draft"])
def test_bundled_models_pass(tmp_path: Path, model: str) -> None:
    """Catches a false alarm at a real tokenizer, config and checkpoint."""
    for path in (ROOT / "assets" / model).iterdir():
        if path.name not in ("README.md", "provenance.json"):
            (tmp_path / path.name).symlink_to(path)
    redaction.check_folder(tmp_path)


# ---- rows of sampled sets ----

TARGET = str(ROOT / "assets" / "target")


def sampled(folder: Path, texts: dict[str, str]) -> Path:
    """A finished set with a row of each text, by id."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    rows = []
    for name, text in texts.items():
        ids = tokenizer(text)["input_ids"]
        rows.append(
            sample_store.SampleRow(
                id=name, source="stdlib", origin="target", input_ids=ids, loss_spans=[[0, len(ids)]],
                finish_reason="eos",
            )
        )  # fmt: skip
    sample_store.write_shard(folder, rows, "0001")
    counts = {"asked": len(rows), "answered": len(rows), "failed": 0}
    write_manifest(
        folder, Manifest(TARGET, None, "33c2eb365440cc00", None, {}, 0, counts, None, {})
    )
    return folder


def build(samples: Path, out: Path) -> Path:
    return publish.build_dataset_folder(samples, "me/s", HubLabels(), out).path


def test_secrets_in_rows_are_found(tmp_path: Path) -> None:
    """Catches a key in an answer, which no search of the parquet file finds; the message names the row."""
    texts = {f"{i:04x}#0": f"import x\nkey = '{text}'\n" for i, text in enumerate(MARKED.values())}
    with pytest.raises(UserError) as caught:
        build(sampled(tmp_path / "s", {"ffff#0": "plain text", **texts}), tmp_path / "out")
    line = str(caught.value)
    assert "row 0000#0 of" in line
    assert "a Hugging Face token" in line
    assert f"(and {len(MARKED) - 1} more rows)" in line
    assert [name for name, secret in MARKED.items() if secret_part(secret) in line] == []
    assert not (tmp_path / "out").exists()


def test_columns_and_metadata_of_others_are_left_out(tmp_path: Path) -> None:
    """Catches a parquet file that is copied with what somebody added to it, and a file of another name."""
    samples = sampled(tmp_path / "s", {"0001#0": "plain text"})
    path = samples / "shards" / "0001.parquet"
    table = pq.read_table(path)
    table = table.append_column("note", [[MARKED["GitHub"]]])
    pq.write_table(table.replace_schema_metadata({"note": MARKED["GitHub"]}), path)
    manifest = read_json(samples / "manifest.json")
    del manifest["shards"]
    (samples / "manifest.json").write_text(json.dumps(manifest))
    out = build(samples, tmp_path / "out")
    copy = pq.read_table(out / "shards" / "0001.parquet")
    own = [n for n in sample_store.SCHEMA.names if n not in sample_store.OF_IMAGES]
    assert copy.schema.names == own
    assert MARKED["GitHub"].encode() not in (out / "shards" / "0001.parquet").read_bytes()
    path.rename(samples / "shards" / f"{MARKED['GitHub']}.parquet")
    with pytest.raises(UserError, match="is not named as train/sample.py names shards") as caught:
        build(samples, tmp_path / "out2")
    assert MARKED["GitHub"] not in str(caught.value)


def test_rows_keep_their_own_arguments_of_the_template(tmp_path: Path) -> None:
    """Catches a copy without them, a secret in them, and older shards, without that column, that cannot be copied."""
    samples = sampled(tmp_path / "s", {"0001#0": "plain text", "0002#0": "more"})
    path, manifest = samples / "shards" / "0001.parquet", read_manifest(samples)
    old = pq.read_table(path).drop_columns(["chat_template_kwargs"])
    rows = list(sample_store.read_shards(samples))
    pq.write_table(old, path)
    assert [*map(str, sample_store.read_shards(samples))] == [*map(str, rows)]
    write_manifest(samples, manifest)
    copied = build(samples, tmp_path / "old") / "shards" / "0001.parquet"
    assert copied.read_bytes() == path.read_bytes()
    for number, own in enumerate(
        ('{"enable_thinking": false}', f'{{"key": "{MARKED["GitHub"]}"}}')
    ):
        rows[1]["chat_template_kwargs"] = own
        path.unlink()
        sample_store.write_shard(samples, rows, "0001")
        write_manifest(samples, manifest)
        if number:
            with pytest.raises(UserError, match="row 0002#0 of .* a GitHub token"):
                build(samples, tmp_path / "secret")
            continue
        out = build(samples, tmp_path / "new")
        assert (out / "shards" / "0001.parquet").read_bytes() == path.read_bytes()
        kept = [row.get("chat_template_kwargs") for row in sample_store.read_shards(out)]
        assert kept == [None, own]


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """Catches a search of texts that are decoded with the wrong vocabulary, in which no secret is found."""
    samples = sampled(tmp_path / "s", {"0001#0": "plain text"})
    manifest = read_json(samples / "manifest.json") | {"tokenizer_hash": "0" * 16}
    (samples / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="give --target, the model that sampled it"):
        build(samples, tmp_path / "out")


def test_published_shards_name_their_target(tmp_path: Path) -> None:
    """Catches a set that forgets who answered when it is published, and a server's name that tells more than a name."""
    samples = sampled(tmp_path / "s", {"0001#0": "plain text"})
    path = samples / "shards" / "0001.parquet"
    rows = list(sample_store.read_shards(samples))
    manifest = read_manifest(samples)
    for number, (target, expected) in enumerate(
        (
            (ModelFingerprint("0123456789abcdef", "int8"), ModelFingerprint("0123456789abcdef", "int8")),
            (ModelFingerprint(served_as="org/model"), ModelFingerprint(served_as="org/model")),
            (ModelFingerprint(served_as="/home/me/model"), ModelFingerprint(served_as="model")),
            (ModelFingerprint(served_as="gemma:7b"), ModelFingerprint(served_as="not published")),
        )
    ):  # fmt: skip
        path.unlink()
        sample_store.write_shard(samples, rows, "0001", target)
        write_manifest(samples, manifest)
        out = build(samples, tmp_path / f"out{number}")
        assert sample_store.targets_in(out) == [expected]
        assert read_manifest(out).fingerprints == [expected]
        copied = (out / "shards" / "0001.parquet").read_bytes()
        assert (copied == path.read_bytes()) == (target == expected)
