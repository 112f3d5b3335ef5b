"""A sampled set for the Hub: its shards without local paths and secrets, and a card from its manifest and its rows."""

import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import DatasetCard, DatasetCardData

from decode.common import files
from decode.common.errors import UserError
from decode.common.files import RUN_FILE
from decode.common.published import Place, hub_snapshot, published
from decode.common.secret_patterns import find_secret, redact
from decode.common.target_record import ModelFingerprint
from decode.common.typed_json import from_json
from decode.model.loading import load_tokenizer, tokenizer_fingerprint
from eval.reporting.formatting import escape_markdown
from train.data import sample_store
from train.data.manifest import MANIFEST_FILE, Manifest, load_set
from train.hub.card_tables import flatten
from train.hub.model_card import render_template
from train.settings.training import HubLabels

SIZES = ("1K", "10K", "100K", "1M", "10M")  # borders of the Hub's size categories
SHARD_NAME = re.compile(r"[0-9a-f]{1,16}\.parquet")


@dataclass(frozen=True)
class DatasetStats:
    """The manifest of a sampled set, and counts by (source, origin)."""

    manifest: dict[str, Any]
    """Its published fields, without the list of shards, whose copies may be others."""
    rows: Counter[tuple[str, str]]  # number of rows
    tokens: Counter[tuple[str, str]]  # tokens of prompts and answers
    supervised: Counter[tuple[str, str]]  # generated tokens, which training learns


def read_stats(folder: Path, target: str = "") -> DatasetStats:
    """Counts every row, and searches its text for secrets. `target` has the tokenizer; empty: the manifest's target.

    UserError for a set that is damaged or not finished, as in `load_set`, for another tokenizer, and for a secret.
    """
    made, samples = load_set(folder)
    if sample_store.image_names(folder):
        raise UserError(
            f"{folder} holds images, which are not published: what they show and say of their maker is not searched"
        )
    tokenizer = load_tokenizer(target or made.target, None if target else made.revision)
    if tokenizer_fingerprint(tokenizer) != made.tokenizer_hash:
        raise UserError(
            f"the tokenizer of {target or made.target} is not the one of {folder}: give --target, the model that "
            "sampled it"
        )
    content = published(made, Manifest, MANIFEST_FILE, _asked_revision(folder))
    rows, tokens, supervised = (Counter[tuple[str, str]]() for _ in range(3))
    leaks: dict[str, str] = {}
    for row in samples:
        kind = (_published_source(row["source"]), row["origin"])
        rows[kind] += 1
        tokens[kind] += len(row["input_ids"])
        supervised[kind] += sum(end - start for start, end in row["loss_spans"])
        own = row.get("chat_template_kwargs", "")
        text = tokenizer.decode(row["input_ids"])
        texts = (row["id"], row["source"], row["finish_reason"], text, own)
        secret = next(filter(None, map(find_secret, texts)), None)
        if secret is not None:
            leaks[redact(row["id"])] = secret.what
    if leaks:
        row_id, what = next(iter(leaks.items()))
        more = f" (and {len(leaks) - 1} more rows)" if len(leaks) > 1 else ""
        raise UserError(
            f"row {row_id} of {folder} holds what looks like {what}{more}: take it out of the prompts, revoke it and "
            "sample again"
        )
    return DatasetStats(content, rows, tokens, supervised)


def copy_shards(folder: Path, out: Path) -> None:
    """Copies the shards byte for byte, unless there is more in them than the columns of a set, or a `source` is a local
    path, which is cut to its last part. UserError for a file name that is not the hash of a shard."""
    (out / "shards").mkdir(parents=True)
    for path in sorted((folder / "shards").glob("*.parquet")):
        if SHARD_NAME.fullmatch(path.name) is None:
            raise UserError(
                f"{folder / 'shards'}: {redact(path.name)} is not named as train/sample.py names shards: rename it"
            )
        table = pq.read_table(path)
        sources = table.column("source").to_pylist()
        clean = [_published_source(source) for source in sources]
        fields = table.schema
        target = sample_store.target_of(fields)
        if target is not None:
            known = published(target, ModelFingerprint, "a shard's target")
            target = from_json(ModelFingerprint, known)
        metadata = sample_store.target_metadata(target)
        columns = [n for n in sample_store.SCHEMA.names if n in fields.names]  # older ones lack one
        extra = fields.names != columns or (fields.metadata or None) != metadata
        if clean == sources and not extra and not any(f.metadata for f in fields):
            shutil.copyfile(path, out / "shards" / path.name)
            continue
        i = fields.get_field_index("source")
        table = table.set_column(i, fields.field(i), pa.array(clean, pa.string())).select(columns)
        table = table.cast(pa.schema([sample_store.SCHEMA.field(name) for name in columns]))
        pq.write_table(
            table.replace_schema_metadata(metadata),
            out / "shards" / path.name,
            row_group_size=sample_store.ROW_GROUP_SIZE,
            write_page_checksum=True,
        )


def _published_source(source: str) -> str:
    return str(published(source, Place, "a row's source"))


def _asked_revision(folder: Path) -> set[str]:
    """The target's commit in the settings that sampled the set, which is no key and published in full."""
    settings = files.read_yaml(folder / RUN_FILE) if (folder / RUN_FILE).is_file() else {}
    asked = settings.get("revision"), *(hub_snapshot(str(settings.get("target"))) or ())
    return {one for one in asked if isinstance(one, str)}


def render(stats: DatasetStats, repo: str, labels: HubLabels) -> DatasetCard:
    """The dataset card."""
    title, rows = repo.rpartition("/")[2], stats.rows.total()
    parts = {"rows": stats.rows, "tokens": stats.tokens, "tokens to learn": stats.supervised}
    revision = stats.manifest.get("revision")
    fields = {
        "title": title,
        "repo": repo,
        "manifest": stats.manifest,
        "revision": f" at revision {revision}" if revision else "",
        "counts": [(name, f"{part.total():,}") for name, part in parts.items()],
        "sources": [
            [escape_markdown(kind[0]), kind[1], *(f"{part[kind]:,}" for part in parts.values())]
            for kind in sorted(stats.rows)
        ],
        "made": [[name, escape_markdown(value)] for name, value in flatten(stats.manifest)],
        "licence": f"Licence: {labels.license}."
        if labels.license
        else "No licence was stated when this was published; those of the target and of the prompts apply.",
    }
    passed = sum(rows >= 10 ** (3 + i) for i in range(len(SIZES)))
    low, high = ("", *SIZES)[passed], (*SIZES, "")[passed]
    data = DatasetCardData(
        pretty_name=title,
        license=labels.license or None,
        base_model=labels.base_model or None,
        source_datasets=[labels.dataset] if labels.dataset else None,
        task_categories=["text-generation"],
        size_categories=f"{low}<n<{high}" if low and high else f"n<{high}" if high else f"n>{low}",
        tags=["speculative-decoding", "distillation", "synthetic"],
        configs=[{"config_name": "default", "data_files": "shards/*.parquet"}],
    )
    body = render_template("dataset_card.md.j2", fields)
    return DatasetCard(f"---\n{data.to_yaml()}\n---\n\n{body}")
