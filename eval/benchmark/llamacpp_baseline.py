"""llama.cpp's server as another engine: plain, with the drafts of the methods, and with its own n-gram lookup.

Each of them is a server of its own, which starts at its first prompt and then waits for its turns without using the
CPU. It decodes as by default: keys and values in float16, flash attention where it has it, as many threads as torch.
The clock runs from the request to the answer.
"""

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from decode.common.errors import UserError, first_line
from decode.common.target_settings import QUANTIZED_DTYPES
from decode.drafts.lookup import NgramDraft
from decode.drafts.registry import draft_family
from decode.model.loading import Target
from decode.serving import gguf_heads
from decode.serving.gguf_export import write_gguf
from decode.serving.llamacpp_engine import LLAMACPP
from decode.serving.running import llama_server
from decode.verification.sampling import SamplingParams
from eval.benchmark.config import is_plain_chain, served_gguf
from eval.benchmark.methods import Method
from eval.benchmark.turns import EngineAnswer
from eval.settings.evaluation import EvalConfig, MethodConfig
from eval.tasks.loading import TaskPrompt
from eval.tasks.stop_strings import trim_at_stop


def check(s: EvalConfig, target: Target) -> None:
    """UserError without a llama-server, and for a target that llama.cpp does not serve."""
    llama_server.find_server(s.llama_server)
    if target.is_encoder_decoder:
        raise UserError("compare llamacpp: give it a decoder, or drop llamacpp from --compare")


def described(s: EvalConfig) -> dict[str, Any]:
    """The fields of a result that say which llama.cpp it was, and what it served."""
    version = llama_server.server_version(llama_server.find_server(s.llama_server))
    return {"version": version, "served": Path(served_gguf(s)).name or s.dtype}


def drafts_of(methods: Sequence[Method], s: EvalConfig) -> list[Method]:
    """The methods that llama.cpp has too: chains of n-grams and of drafts of its families."""
    own = {m.name: m for m in s.methods if is_plain_chain(m)}
    return [m for m in methods if m.name in own and m.shape is None and _has(m, own[m.name])]


def _has(method: Method, own: MethodConfig) -> bool:
    if isinstance(method.draft, NgramDraft):
        return True
    return bool(own.draft) and bool(LLAMACPP.method(_family(own.draft)))


def _family(draft: str) -> str:
    return "causal" if Path(draft).suffix == ".gguf" else draft_family(draft)


def target_file(s: EvalConfig, block: ExitStack) -> Path:
    """The GGUF file that all servers read; one that had to be written is gone when `block` ends."""
    if served_gguf(s):
        return Path(served_gguf(s))
    file = Path(block.enter_context(tempfile.TemporaryDirectory())) / "target.gguf"
    write_gguf(s.target, file, s.dtype)  # type: ignore[arg-type]
    return file


class LlamaCppEngine:
    """A llama-server with the target, and the method's draft unless that is None."""

    def __init__(
        self,
        s: EvalConfig,
        target: Target,
        method: Method | None,
        sampling: SamplingParams,
        file: Path,
        context: int,
        block: ExitStack,
    ):
        """`file` is the target's; `context` is the tokens of the longest request. The draft's file is written now; it
        and the server are gone when `block` ends."""
        self.s, self.target, self.sampling, self.block = s, target, sampling, block
        self.context = min(target.runner.context, context + (method.k if method else 0) + 1)
        self.folder = Path(block.enter_context(tempfile.TemporaryDirectory()))
        self.file, self.url = file, ""
        self.options = [] if method is None else self._draft_options(method)

    def _draft_options(self, method: Method) -> list[str]:
        if isinstance(method.draft, NgramDraft):
            return llama_server.ngram_options(method.draft.longest, method.k)
        own = next(m for m in self.s.methods if m.name == method.name)
        family, file = _family(own.draft), Path(own.gguf or own.draft)
        if file.suffix != ".gguf":
            file = self.folder / "draft.gguf"
            dtype = own.dtype or self.s.dtype
            written: Any = "float32" if dtype in QUANTIZED_DTYPES else dtype
            write = write_gguf if family == "causal" else gguf_heads.write_head
            write(own.draft, file, dtype=written, target=self.s.target)
        return llama_server.draft_options(file, LLAMACPP.method(family), method.k)

    def answer(self, item: TaskPrompt) -> EngineAnswer:
        """{ids, seconds, rounds, accepted}, or {error}."""
        room = self.target.runner.context - len(item.prompt_ids)
        limit = min(self.s.max_new_tokens, room)
        try:
            if not self.url:
                server = llama_server.find_server(self.s.llama_server)
                running = llama_server.llama_server(server, self.file, self.context, self.options)
                self.url = self.block.enter_context(running)
            start = time.perf_counter()
            said = llama_server.complete(
                self.url, item.prompt_ids, limit, self.sampling, self.s.seed, item.stop
            )
            seconds = time.perf_counter() - start
        except UserError as error:  # named in the report, like our own failures
            return {"error": first_line(error)}
        accepted = int(said["timings"].get("draft_n_accepted", 0))
        ids = trim_at_stop(said["tokens"], item.stop, self.target.tokenizer)
        # Prefill gives the first token, a round what it accepts and one more.
        rounds = max(0, len(said["tokens"]) - 1 - accepted)
        return {"ids": ids, "seconds": seconds, "rounds": rounds, "accepted": accepted}
