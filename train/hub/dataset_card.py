"""A sampled set for the Hub: its shards without local paths, and a data card from its manifest and its rows."""

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
"""The Hub's words for how many rows there are."""


@dataclass(frozen=True)
class DatasetStats:
    """A sampled set as counted."""

    manifest: dict[str, Any]
    """Without local paths."""
    rows: Counter[tuple[str, str]]
    """By source and origin; so are tokens, and tokens to learn."""
    tokens: Counter[tuple[str, str]]
    learned: Counter[tuple[str, str]]


def read_stats(folder: Path) -> DatasetStats:
    """Counts every row. UserError for a damaged set, or one whose manifest counts other rows."""
    sample_store.read_manifest(folder)
    manifest = files.read_json(folder / "manifest.json")
    rows: Counter[tuple[str, str]] = Counter()
    tokens: Counter[tuple[str, str]] = Counter()
    learned: Counter[tuple[str, str]] = Counter()
    for row in sample_store.read_shards(folder):
        kind = (redaction.strip_local_paths(row["source"]), row["origin"])
        rows[kind] += 1
        tokens[kind] += len(row["input_ids"])
        learned[kind] += sum(end - start for start, end in row["loss_spans"])
    counts = manifest["counts"]
    counted, told = rows.total(), counts["answered"] + counts.get("answers_too_short", 0)
    if counted != told:
        raise UserError(
            f"{folder} holds {counted} rows and its manifest counts {told}: finish train/sample.py first"
        )
    return DatasetStats(redaction.strip_local_paths(manifest), rows, tokens, learned)


def copy_shards(folder: Path, out: Path) -> None:
    """The shards to the byte, unless a source of theirs is a local path, which is cut to its last part."""
    (out / "shards").mkdir(parents=True)
    for path in sorted((folder / "shards").glob("*.parquet")):
        table = pq.read_table(path)
        sources = table.column("source").to_pylist()
        clean = [redaction.strip_local_paths(source) for source in sources]
        if clean == sources:
            shutil.copyfile(path, out / "shards" / path.name)
        else:
            at = table.schema.get_field_index("source")
            table = table.set_column(at, table.schema.field(at), pa.array(clean, pa.string()))
            pq.write_table(
                table,
                out / "shards" / path.name,
                row_group_size=sample_store.ROW_GROUP_SIZE,
                write_page_checksum=True,
            )


def render(made: DatasetStats, repo: str, labels: HubLabels) -> DatasetCard:
    """The data card."""
    title, rows = repo.rpartition("/")[2], made.rows.total()
    counts = [
        ("rows", rows),
        ("tokens", made.tokens.total()),
        ("tokens to learn", made.learned.total()),
    ]
    parts = (made.rows, made.tokens, made.learned)
    revision = made.manifest.get("revision")
    fields = {
        "title": title,
        "repo": repo,
        "manifest": made.manifest,
        "revision": f" at revision {revision}" if revision else "",
        "counts": [(name, f"{count:,}") for name, count in counts],
        "sources": [
            [escape_markdown(kind[0]), kind[1], *(f"{part[kind]:,}" for part in parts)]
            for kind in sorted(made.rows)
        ],
        "made": [[name, escape_markdown(value)] for name, value in flatten(made.manifest)],
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
