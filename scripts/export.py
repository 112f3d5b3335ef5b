"""Writes a draft in another layout: for another engine or trainer, or in ours from one that was published elsewhere.

    python scripts/export.py outputs/bundled/drafts/eagle3 --format speculators --target ORG/MODEL --out exported

flat           EAGLE-3, EAGLE-1 and Medusa as they are saved here, for serving engines
speculators    EAGLE-3 with the nested config that the speculators library trains, from which a draft alone is served
medusa-legacy  Medusa with the numbered tensors of FasterDecoding, TensorRT-LLM and TGI
hf             a causal draft with the target's tokenizer files, its vocabulary padded with zeros to the target's
gguf           EAGLE-3, DFlash, DSpark or a causal draft (Llama and Qwen 2) for llama.cpp, as model.gguf; a target too,
               without --target

    python scripts/export.py outputs/draft --format gguf --target TARGET --out exported/draft
    python scripts/export.py TARGET --format gguf --dtype float16 --out exported/target
    llama-server -m exported/target/model.gguf -md exported/draft/model.gguf --spec-type draft-eagle3

--spec-type is draft-eagle3, draft-dflash or draft-dspark for heads and draft-simple for a causal draft. What llama.cpp
does not compute is refused before anything is written (scripts/check_draft.py --engine llamacpp names it too).

Tensors are copied bit for bit, but for a GGUF's, which get --dtype, and rows of the LM head for tokens outside a causal
draft's reduced vocabulary, which get their mean. The draft may be any that loads here: ours, or
published ones (decode/checkpoints/importers.py).
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.checkpoints import importers, layouts
from decode.checkpoints.draft_folder import read_metadata
from decode.checkpoints.draft_vocab import VOCAB_FILE
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.ranges import DraftLength
from decode.common.run_dir import check_folder, replace_folder
from decode.drafts.registry import draft_family
from decode.model.fingerprint import TargetRecord
from decode.model.formats.gguf_files import gguf_folder
from decode.model.loading import NUMBER_TYPES, load_tokenizer, tokenizer_fingerprint
from decode.model.names import check_name
from decode.serving import export as exporters
from decode.serving import gguf_export, gguf_heads
from decode.serving.gguf_export import GgufType

HEAD_FORMATS, CAUSAL_FORMATS = (*exporters.LAYOUTS, "gguf"), ("hf", "gguf")


@dataclass
class ExportConfig:
    draft: str = ""
    """The draft's folder or Hub name; may stand first without --draft."""
    format: str = ""
    """flat, speculators, medusa-legacy, hf or gguf."""
    out: str = ""
    """A new or empty folder."""
    target: str = ""
    """The target's name as users load it; empty: the one in draftsmith.json. hf needs its folder.
    gguf: of heads it gives the tokenizer, and a causal draft gets as many logits as it has; for the latter empty: it
    keeps its own."""
    k: DraftLength = 4
    """Tokens drafted a round, which the speculators format records."""
    dtype: GgufType = "float32"
    """gguf: how matrices are stored; a draft in bfloat16 loses nothing by bfloat16."""


def main(s: ExportConfig) -> None:
    """Writes the copy to the folder `out`. UserError for a layout that the draft's family does not have."""
    formats = (*HEAD_FORMATS, "hf")
    if not s.draft or not s.out or s.format not in formats:
        raise UserError(f"give a draft's folder, --out and --format, one of {', '.join(formats)}")
    out = Path(s.out)
    check_folder(out)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{s.out} is not empty: name a new folder with --out")
    if s.target:
        check_name(s.target, "target")
    path = gguf_folder(s.draft, dtype=NUMBER_TYPES["float32"]) or importers.resolve_folder(s.draft)
    if not (Path(path) / "config.json").is_file():
        raise UserError(f"draft {s.draft!r} holds no config.json: give the folder of a saved draft")
    family, facts = draft_family(path), read_metadata(path)
    target = s.target or (facts.target or TargetRecord()).name
    if s.format not in (CAUSAL_FORMATS if family == "causal" else HEAD_FORMATS):
        raise UserError(
            f"a draft of family {family} has no layout {s.format!r}: hf is for causal drafts, gguf for both, the "
            "others are for heads"
        )
    with replace_folder(out) as folder:
        if s.format == "gguf":
            folder.mkdir(parents=True, exist_ok=True)
            if family == "causal":
                gguf_export.write_gguf(path, folder / "model.gguf", s.dtype, s.target)
            else:
                gguf_heads.write_head(path, folder / "model.gguf", target, s.dtype)
        elif s.format == "hf":
            exporters.export_hf(s.draft, target, folder)
            if facts.is_known:  # the target's tokenizer may have more tokens
                own = tokenizer_fingerprint(load_tokenizer(target))
                facts = replace(facts, tokenizer_hash=own)
        else:
            checkpoint = importers.read_checkpoint(path)
            layouts.write_checkpoint(folder, *exporters.LAYOUTS[s.format](checkpoint, target, s.k))
        if s.format != "gguf":  # a folder with a GGUF alone loads as that model
            exporters.write_metadata(path, facts, folder)
    if s.format in CAUSAL_FORMATS and (Path(path) / VOCAB_FILE).is_file():
        print(
            f"note: tokens outside {VOCAB_FILE}, which were not trained, got the mean row of the LM head: engines that "
            "compute all of it never find one of them most probable"
        )
    print(
        f"{family} in the {s.format} layout: {', '.join(sorted(file.name for file in out.iterdir()))}"
    )


if __name__ == "__main__":
    run_command(main, ExportConfig, __doc__, first="draft")
