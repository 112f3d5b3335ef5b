"""Writes a draft in another layout: for another engine or trainer, or in ours from one that was published elsewhere.

    python scripts/export.py outputs/bundled/drafts/eagle3 --format speculators --target ORG/MODEL --out exported

flat           EAGLE-3, EAGLE-1 and Medusa as they are saved here, for serving engines
speculators    EAGLE-3 with the nested config that the speculators library trains, from which a draft alone is served
medusa-legacy  Medusa with the numbered tensors of FasterDecoding, TensorRT-LLM and TGI
hf             a causal draft with the target's tokenizer files and as many rows of vocabulary: added ones are the mean
               of the others, surplus ones are cut off
gguf           EAGLE-3, DFlash, DSpark or a causal draft (Llama and Qwen 2) for llama.cpp, as model.gguf; a target too,
               without --target
transplant     a causal draft of another tokenizer with the target's: a token that both have keeps its row of embedding
               and LM head, another gets the mean of the rows of the tokens that spell it
w8a8           a whole model, such as a target, in compressed-tensors' int8 for vLLM: a scale for each output of a layer
               and each token of its inputs, rounded to nearest

    python scripts/export.py outputs/draft --format gguf --target TARGET --out exported/draft
    python scripts/export.py TARGET --format gguf --dtype float16 --out exported/target
    python scripts/export.py TARGET --format w8a8 --out exported/TARGET-W8A8
    llama-server -m exported/target/model.gguf -md exported/draft/model.gguf --spec-type draft-eagle3

--spec-type is draft-eagle3, draft-dflash or draft-dspark for heads and draft-simple for a causal draft. What llama.cpp
does not compute is refused before anything is written (scripts/check_draft.py --engine llamacpp names it too).

flat, speculators and medusa-legacy copy tensors bit for bit. gguf stores matrices in --dtype, hf and transplant make
rows of the vocabulary, w8a8 rounds weights; rows of the LM head for tokens outside a causal draft's reduced vocabulary
get the mean of those inside. The draft may be one that loads here, ours or published (decode/checkpoints/importers.py),
but for PARD, DFlash 2, XPress and Domino, and EAGLE-3 or P-EAGLE heads with other than one layer of Llama.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.ranges import DraftLength, FloatName


@dataclass
class ExportConfig:
    draft: str = ""
    """The draft's folder or Hub name; may stand first without --draft."""
    format: str = ""
    """flat, speculators, medusa-legacy, hf, gguf, transplant or w8a8."""
    out: str = ""
    """A new or empty folder."""
    target: str = ""
    """The target's name as users load it; empty: the one in draftsmith.json. hf needs its folder,
    transplant that it is given.
    gguf: of heads it gives the tokenizer, and a causal draft gets as many logits as it has; for the latter empty: it
    keeps its own."""
    k: DraftLength = 4
    """Tokens drafted a round, which the speculators format records."""
    dtype: FloatName = "float32"
    """gguf: how matrices are stored; a draft in bfloat16 loses nothing by bfloat16."""


def main(s: ExportConfig) -> None:
    """Writes the copy to the folder `out`. UserError for a layout that the draft's family does not have."""
    from decode.serving.export import (  # loads torch: --help does without
        CAUSAL_FORMATS,
        HEAD_FORMATS,
        export_draft,
    )

    formats = dict.fromkeys((*HEAD_FORMATS, *CAUSAL_FORMATS))
    if not s.draft or not s.out or s.format not in formats:
        raise UserError(f"give a draft's folder, --out and --format, one of {', '.join(formats)}")
    print(*export_draft(s.draft, s.format, Path(s.out), s.target, s.k, s.dtype), sep="\n")


if __name__ == "__main__":
    run_command(main, ExportConfig, __doc__, first="draft")
