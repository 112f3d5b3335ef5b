"""python tests/in_chunks.py COMMAND …: the command with losses over five rows at a time, as over large vocabularies."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train.losses import chunked_sums

chunked_sums.max_chunk_rows = lambda vocab_size, budget_bytes=0: 5
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
