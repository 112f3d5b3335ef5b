"""A sampled set for the Hub: its shards without local paths, and a data card from its manifest and its rows."""

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import DatasetCard, DatasetCardData

from decode import runs
from decode.settings import UserError
from eval.wording import markdown
from train import scrub, shards
from train.card import fill
from train.card_tables import flat
from train.upload import Labels

SIZES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
)
"""The Hub's words for how many rows there are."""


@dataclass(frozen=True)
class Made:
    """A sampled set as counted."""

    manifest: dict[str, Any]
    """Without local paths."""
    rows: Counter[tuple[str, str]]
    """By source and origin; so are tokens, and tokens to learn."""
    tokens: Counter[tuple[str, str]]
    learned: Counter[tuple[str, str]]


def read(folder: Path) -> Made:
    """Counts every row. UserError for a damaged set, or one whose manifest counts other rows."""
    shards.read_manifest(folder)
    manifest = runs.read_json(folder / "manifest.json")
    rows: Counter[tuple[str, str]] = Counter()
    tokens: Counter[tuple[str, str]] = Counter()
    learned: Counter[tuple[str, str]] = Counter()
    for row in shards.read_shards(folder):
        kind = (scrub.public(row["source"]), row["origin"])
        rows[kind] += 1
        tokens[kind] += len(row["input_ids"])
        learned[kind] += sum(end - start for start, end in row["loss_spans"])
    counts = manifest["counts"]
    counted, told = rows.total(), counts["answered"] + counts.get("answers_too_short", 0)
    if counted != told:
        raise UserError(
            f"{folder} holds {counted} rows and its manifest counts {told}: finish train/sample.py first"
        )
    return Made(scrub.public(manifest), rows, tokens, learned)


def copy_shards(folder: Path, out: Path) -> None:
    """The shards to the byte, unless a source of theirs is a local path, which is cut to its last part."""
    (out / "shards").mkdir(parents=True)
    for path in sorted((folder / "shards").glob("*.parquet")):
        table = pq.read_table(path)
        sources = table.column("source").to_pylist()
        clean = [scrub.public(source) for source in sources]
        if clean == sources:
            shutil.copyfile(path, out / "shards" / path.name)
        else:
            at = table.schema.get_field_index("source")
            table = table.set_column(at, table.schema.field(at), pa.array(clean, pa.string()))
            pq.write_table(
                table,
                out / "shards" / path.name,
                row_group_size=shards.GROUP,
                write_page_checksum=True,
            )


def render(made: Made, repo: str, labels: Labels) -> DatasetCard:
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
            [markdown(kind[0]), kind[1], *(f"{part[kind]:,}" for part in parts)]
            for kind in sorted(made.rows)
        ],
        "made": [[name, markdown(value)] for name, value in flat(made.manifest)],
        "licence": f"Licence: {labels.license}."
        if labels.license
        else "No licence was stated when this was published; those of the target and of the prompts apply.",
    }
    data = DatasetCardData(
        pretty_name=title,
        license=labels.license or None,
        task_categories=["text-generation"],
        size_categories=next((word for size, word in SIZES if rows < size), "n>10M"),
        tags=["speculative-decoding", "distillation", "synthetic"],
        configs=[{"config_name": "default", "data_files": "shards/*.parquet"}],
    )
    body = fill("samples_card.md.j2", fields)
    return DatasetCard(f"---\n{data.to_yaml()}\n---\n\n{body}")
