"""A sampled set for the Hub: its shards without local paths, and a card from its manifest and its rows."""

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
from eval.reporting.formatting import escape_markdown
from train.data import sample_store
from train.hub import redaction
from train.hub.card_tables import flatten
from train.hub.model_card import render_template
from train.hub.upload import HubLabels

SIZE_CATEGORIES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
)
"""(number of rows below which it applies, the Hub's size category)."""


@dataclass(frozen=True)
class DatasetStats:
    """The manifest of a sampled set, and counts by (source, origin)."""

    manifest: dict[str, Any]
    """Without local paths."""
    rows: Counter[tuple[str, str]]
    """Number of rows."""
    tokens: Counter[tuple[str, str]]
    """Tokens of prompts and answers."""
    supervised: Counter[tuple[str, str]]
    """Generated tokens, which training learns."""


def read_stats(folder: Path) -> DatasetStats:
    """Counts every row. UserError for a damaged set, or if the manifest counts another number of rows."""
    sample_store.read_manifest(folder)
    manifest = files.read_json(folder / "manifest.json")
    rows: Counter[tuple[str, str]] = Counter()
    tokens: Counter[tuple[str, str]] = Counter()
    supervised: Counter[tuple[str, str]] = Counter()
    for row in sample_store.read_shards(folder):
        kind = (redaction.strip_local_paths(row["source"]), row["origin"])
        rows[kind] += 1
        tokens[kind] += len(row["input_ids"])
        supervised[kind] += sum(end - start for start, end in row["loss_spans"])
    counts = manifest["counts"]
    counted, expected = rows.total(), counts["answered"] + counts.get("answers_too_short", 0)
    if counted != expected:
        raise UserError(
            f"{folder} has {counted} rows and its manifest counts {expected}: finish train/sample.py first"
        )
    return DatasetStats(redaction.strip_local_paths(manifest), rows, tokens, supervised)


def copy_shards(folder: Path, out: Path) -> None:
    """Copies the shards byte for byte, unless a `source` in them is a local path: it is cut to its last part."""
    (out / "shards").mkdir(parents=True)
    for path in sorted((folder / "shards").glob("*.parquet")):
        table = pq.read_table(path)
        sources = table.column("source").to_pylist()
        clean = [redaction.strip_local_paths(source) for source in sources]
        if clean == sources:
            shutil.copyfile(path, out / "shards" / path.name)
        else:
            i = table.schema.get_field_index("source")
            table = table.set_column(i, table.schema.field(i), pa.array(clean, pa.string()))
            pq.write_table(
                table,
                out / "shards" / path.name,
                row_group_size=sample_store.ROW_GROUP_SIZE,
                write_page_checksum=True,
            )


def render(stats: DatasetStats, repo: str, labels: HubLabels) -> DatasetCard:
    """The dataset card."""
    title, rows = repo.rpartition("/")[2], stats.rows.total()
    counts = [
        ("rows", rows),
        ("tokens", stats.tokens.total()),
        ("tokens to learn", stats.supervised.total()),
    ]
    parts = (stats.rows, stats.tokens, stats.supervised)
    revision = stats.manifest.get("revision")
    fields = {
        "title": title,
        "repo": repo,
        "manifest": stats.manifest,
        "revision": f" at revision {revision}" if revision else "",
        "counts": [(name, f"{count:,}") for name, count in counts],
        "sources": [
            [escape_markdown(kind[0]), kind[1], *(f"{part[kind]:,}" for part in parts)]
            for kind in sorted(stats.rows)
        ],
        "made": [[name, escape_markdown(value)] for name, value in flatten(stats.manifest)],
        "licence": f"Licence: {labels.license}."
        if labels.license
        else "No licence was stated when this was published; those of the target and of the prompts apply.",
    }
    data = DatasetCardData(
        pretty_name=title,
        license=labels.license or None,
        task_categories=["text-generation"],
        size_categories=next((word for size, word in SIZE_CATEGORIES if rows < size), "n>10M"),
        tags=["speculative-decoding", "distillation", "synthetic"],
        configs=[{"config_name": "default", "data_files": "shards/*.parquet"}],
    )
    body = render_template("dataset_card.md.j2", fields)
    return DatasetCard(f"---\n{data.to_yaml()}\n---\n\n{body}")
