"""What is checked before anything is measured: the settings of eval/run.py, and whose measurements the journal has."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from decode.common.errors import UserError
from decode.common.journal import Journal
from decode.common.ranges import MAX_DRAFT_LENGTH
from decode.common.run_dir import RunFolder, refuse_change
from decode.common.target_record import ModelFingerprint, difference
from decode.common.target_settings import QUANTIZED_DTYPES
from decode.common.typed_json import from_json, to_json
from decode.constraints.grammar import is_constrained
from decode.devices.choice import pick_device
from decode.drafts.settings import SwiftConfig
from decode.engine.modes import CAPTURED
from decode.verification.registry import find_rule
from eval.settings.evaluation import EvalConfig, MethodConfig
from eval.tasks.dataset_specs import load_dataset_specs
from eval.tasks.loading import TaskPrompt

ENGINES = ("hf", "hf-assisted", "hf-lookup", "llamacpp", "vllm")
TARGETS, DRAFTS = ["target"], ["drafts"]
"""Keys of what was measured: the targets, the last one that of now, and the checksums of drafts."""


def requested_engines(s: EvalConfig) -> list[str]:
    """The engines named in `compare`."""
    return [name.strip() for name in s.compare.split(",") if name.strip()]


def is_plain_chain(m: MethodConfig) -> bool:
    """Whether other engines are asked to draft so: no lookup in front, a fixed K, no mirror, no learning."""
    return not (m.lookup or m.confidence or m.mirror.exit_layer or m.learn)


def served_gguf(s: EvalConfig) -> str:
    """The target's GGUF file that llama.cpp serves; "" if it has to be written."""
    return s.llama_gguf or (s.target if Path(s.target).suffix == ".gguf" else "")


def vllm_dtype(s: EvalConfig) -> str:
    """The dtype in which vLLM serves."""
    return s.vllm_dtype or s.dtype


def input_paths(s: EvalConfig) -> list[str]:
    """What the run reads: folders and files, or names of other things."""
    models = [s.target, s.original, *(x for m in s.methods for x in (m.draft, m.gguf))]
    grammars = [s.constraint.json_schema, s.constraint.grammar]
    return [*models, s.llama_gguf, s.vllm_target, *grammars, *(task.path for task in s.tasks)]


def check(s: EvalConfig) -> None:
    """UserError for settings that contradict each other."""
    names, tasks = [m.name for m in s.methods], [task.name for task in s.tasks]
    engines, kinds = requested_engines(s), load_dataset_specs()
    grammar = is_constrained(s.constraint)
    on_gpu = pick_device(s.device).startswith("cuda")
    _refuse(
        (not s.temperatures or not s.tasks, "give at least one temperature and one task"),
        (len({*s.temperatures}) < len(s.temperatures), f"temperatures {s.temperatures}: give each one once"),
        (s.mode in CAPTURED and not on_gpu, f"mode {s.mode} needs a CUDA device: choose eager or compiled"),
        *((x.kind not in ("", *kinds), f"task {x.name!r}: no kind {x.kind!r}; there are {', '.join(kinds)}")
          for x in s.tasks),
        (len({*tasks, "all"}) <= len(tasks),
         f"tasks {', '.join(tasks)}: give every task its own name; `all` is the pooled one"),
        (len({*names, "plain", ""}) < len(names) + 2, "give every method its own name; plain is always there"),
        *((len(x) != 2 or len({*x} & {*names}) != 2,
           f"acceptance.pairs {x}: give pairs of two of the methods {', '.join(names)}") for x in s.acceptance.pairs),
        *((x not in ENGINES, f"compare: no engine {x!r}; there are {', '.join(ENGINES)}") for x in engines),
        ("vllm" in engines and not s.vllm_python,
         "compare vllm: give --vllm_python, an interpreter that has vLLM"),
        ("vllm" in engines and vllm_dtype(s) in QUANTIZED_DTYPES,
         f"compare vllm: it has no dtype {vllm_dtype(s)}: give --vllm_dtype bfloat16"),
        ("llamacpp" in engines and s.llama_gguf and not Path(s.llama_gguf).is_file(),
         f"no file {s.llama_gguf}: correct --llama_gguf"),
        ("llamacpp" in engines and s.dtype in QUANTIZED_DTYPES and not served_gguf(s),
         f"compare llamacpp: dtype {s.dtype} is not written as GGUF: give --llama_gguf, the file that it serves"),
        (s.check_law and not any(s.temperatures), "check_law tests sampling: add a temperature above 0"),
        (grammar and s.mode not in ("auto", "eager"),
         "constraint: a grammar is asked for each token on the host: choose mode eager"),
        (grammar and (engines or s.check_law or s.original),
         "constraint: leave out compare, check_law and original, which know no grammar"),
    )  # fmt: skip
    for m in s.methods:
        _check_method(s, m, grammar)


def check_images(s: EvalConfig, items: Sequence[TaskPrompt]) -> None:
    """UserError, which names it, for what reads token ids alone where prompts hold images."""
    blind = [f"compare {engine}" for engine in requested_engines(s) if engine != "hf"]
    blind += ["check_law"] * (s.check_law > 0) + ["original"] * bool(s.original)
    shown = next((item for item in items if item.images is not None), None)
    if shown is not None and blind:
        raise UserError(
            f"task {shown.task!r} has prompts with images, which {', '.join(blind)} cannot read: leave it out, or the "
            "prompts"
        )


def _check_method(s: EvalConfig, m: MethodConfig, grammar: bool) -> None:
    find_rule(m.rule)  # or a UserError
    captured, name, nodes = s.mode in CAPTURED, f"method {m.name!r}", len(m.tree.paths)
    tree, mirror = m.tree.nodes > 0, m.mirror.exit_layer > 0
    _refuse(
        (nodes > MAX_DRAFT_LENGTH, f"{name}: tree.paths has {nodes} nodes: give at most {MAX_DRAFT_LENGTH:,}"),
        (m.layers and m.draft, f"{name}: layers is for early-exit and swift, without a draft"),
        (m.lookup and captured,
         f"{name}: in mode {s.mode} the host cannot ask a lookup: choose eager or compiled"),
        (m.confidence and captured,
         f"{name}: confidence: in mode {s.mode} the host cannot end a chain: choose eager or compiled"),
        ((m.swift != SwiftConfig() or m.state) and (m.name != "swift" or m.draft),
         f"{name}: swift and state are for the method swift without a draft"),
        (m.learn and s.mode not in ("auto", "eager"),
         f"{name}: learn: in mode {s.mode} the host cannot read the target's logits: choose eager"),
        (m.learn and grammar, f"{name}: learn: a draft that learns follows no grammar: leave out one of both"),
        (mirror and (m.confidence or m.lookup or s.mode not in ("auto", "eager")),
         f"{name}: mirror is for small language models alone and mode eager: drop confidence, lookup and mode"),
        (grammar and (m.confidence or tree or m.tree.paths or mirror),
         f"{name}: a grammar follows chains of K drafts: leave out confidence, tree, mirror"),
    )  # fmt: skip


def _refuse(*cases: tuple[object, str]) -> None:
    """UserError with the message of the first case that holds."""
    for holds, message in cases:
        if holds:
            raise UserError(message)


def open_journal(
    run: RunFolder, target: ModelFingerprint, drafts: Mapping[str, str | None], allow_changed: bool
) -> Journal:
    """The journal of the run; `drafts` are the checksums of their weights by name.

    UserError if target or drafts are others than when it began, unless `allow_changed`.
    """
    journal = run.journal()
    targets = journal.get(TARGETS) or ([{}] if journal.num_resumed else [to_json(target)])
    found = difference(from_json(ModelFingerprint, targets[-1]), target)
    if found:
        refuse_change(f"{run.path} was measured with another target ({found})", allow_changed)
    if to_json(target) not in targets:
        targets = [*targets, to_json(target)]
    then = journal.get(DRAFTS) or dict(drafts)
    changed = [
        f"{name} ({str(then.get(name))[:16]} then, {str(now)[:16]} now)"
        for name, now in drafts.items()
        if then.get(name) != now
    ]
    if changed:
        what = f"{run.path} was measured with other weights of {', '.join(changed)}"
        refuse_change(what, allow_changed)
    for key, value in ((TARGETS, targets), (DRAFTS, dict(drafts))):
        if journal.get(key) != value:
            journal.put(key, value)
    return journal


def earlier_targets(journal: Journal) -> list[ModelFingerprint]:
    """The other targets that measurements in it may be of, because `allow_changed` was set; one without a name may be
    empty."""
    return [from_json(ModelFingerprint, x) for x in (journal.get(TARGETS) or [])[:-1]]
