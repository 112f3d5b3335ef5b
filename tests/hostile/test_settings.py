"""Settings of the wrong shape, from YAML files and the command line: keys, types, encodings, bombs."""

import re
from pathlib import Path

import pytest

from tests.hostile.case import Case, check, params
from tests.hostile.files import folder, link, write
from tests.hostile.lab import Lab

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
"""YAML of 9 levels whose aliases stand for 9⁹ items."""
DEEP = "[" * 100_000 + "]" * 100_000

CONFIGS: list[tuple[str, str, str | bytes, str]] = [
    ("train/sample.py", "words", "just words\n", "c.yaml"),
    ("train/sample.py", "list", "- a\n- b\n", "c.yaml"),
    ("train/sample.py", "not YAML", "k: [1\n", "c.yaml"),
    ("train/sample.py", "tab", "k:\n\t- 1\n", "c.yaml"),
    ("train/sample.py", "unknown key", "batchsize: 3\n", "batch_size"),
    ("train/sample.py", "unknown nested", "sampling: {temp: 1}\n", "temp"),
    ("train/sample.py", "repeated key", "k: 3\nk: 5\n", "k"),
    ("train/sample.py", "repeated nested key", "sampling: {top_k: 3, top_k: 5}\n", "top_k"),
    ("train/sample.py", "group is a number", "sampling: 3\n", "sampling"),
    ("train/sample.py", "group is a list", "filters: [1]\n", "filters"),
    ("train/sample.py", "null", "k: null\n", "k"),
    ("train/sample.py", "text for a number", "batch_size: many\n", "batch_size"),
    ("train/sample.py", "yes for a number", "batch_size: true\n", "batch_size"),
    ("train/sample.py", "fraction", "batch_size: 1.5\n", "batch_size"),
    ("train/sample.py", "sources is a text", "sources: prompts.jsonl\n", "sources"),
    ("train/sample.py", "sources is a mapping", "sources: {kind: file}\n", "sources"),
    ("train/sample.py", "sources is null", "sources: null\n", "sources"),
    ("train/sample.py", "no kind", "sources: [{path: x.txt}]\n", "kind"),
    ("train/sample.py", "unknown kind", "sources: [{kind: web, path: x}]\n", "kind"),
    ("train/sample.py", "number as a path", "target: [1]\n", "target"),
    ("train/sample.py", "alias bomb", BOMB, "c.yaml"),
    ("train/sample.py", "alias bomb in a setting", BOMB + "decontaminate: *i\n", "c.yaml"),
    ("train/sample.py", "deep", f"sources: {DEEP}\n", "c.yaml"),
    ("train/sample.py", "endless alias", "k: &a [*a]\n", "c.yaml"),
    ("train/sample.py", "5,000 digits", f"k: {'9' * 5000}\n", "c.yaml"),
    ("train/sample.py", "not UTF-8", "target: caf\xe9\n".encode("latin-1"), "c.yaml"),
    ("train/sample.py", "UTF-16", "k: 3\n".encode("utf-16"), "c.yaml"),
    ("train/sample.py", "NUL", b"k: 3\x00\n", "c.yaml"),
    ("train/sample.py", "python tag", "k: !!python/object/apply:os.getpid []\n", "c.yaml"),
    ("train/sample.py", "two documents", "k: 3\n---\nk: 5\n", "c.yaml"),
    ("train/sample.py", "merge key", "a: &a {top_k: 3}\nsampling: {<<: *a}\n", "a"),
    ("train/write_prompts.py", "systems is a number", "systems: 3\n", "systems"),
    ("train/write_prompts.py", "systems is a text", "systems: Be odd.\n", "systems"),
    ("train/write_prompts.py", "systems holds null", "systems: [null]\n", "systems"),
    ("train/write_prompts.py", "systems holds a list", "systems: [[a]]\n", "systems"),
    ("train/write_prompts.py", "a setting of sample.py", "sources: []\n", "sources"),
    ("train/distill.py", "loop is a list", "loop: [1, 2]\n", "loop"),
    ("train/distill.py", "loop is null", "loop: null\n", "loop"),
    ("train/distill.py", "steps is null", "loop: {steps: null}\n", "steps"),
    ("train/distill.py", "mix is a list", "divergence: {mix: [hard_ce]}\n", "mix"),
    ("train/distill.py", "mix is text", "divergence: {mix: {hard_ce: much}}\n", "mix"),
    ("train/distill.py", "mix is null", "divergence: {mix: {hard_ce: null}}\n", "mix"),
    ("train/distill.py", "unknown key", "loop: {stepz: 1}\n", "steps"),
    ("train/distill.py", "another command's config", "methods: [{name: ngram}]\n", "methods"),
    ("train/distill.py", "old and new name", "compare: {top: 3}\ndivergence: {top: 4}\n", "divergence"),
    ("train/distill.py", "layers is a number", "draft: {layers: 3}\n", "layers"),
    ("train/distill.py", "data is a number", "data: 7\n", "data"),
    ("train/distill.py", "data without path", "data: [{weight: 1}]\n", "data"),
    ("eval/run.py", "methods is a text", "methods: ngram\n", "methods"),
    ("eval/run.py", "methods is null", "methods: null\n", "methods"),
    ("eval/run.py", "method without name", "methods: [{draft: x}]\n", "name"),
    ("eval/run.py", "tree is a number", "methods: [{name: ngram, tree: 3}]\n", "tree"),
    ("eval/run.py", "tasks is a text", "tasks: code\n", "tasks"),
    ("eval/run.py", "temperatures is a number", "temperatures: 0.0\n", "temperatures"),
    ("eval/run.py", "temperatures holds null", "temperatures: [null]\n", "temperatures"),
    ("eval/run.py", "pairs is flat", "acceptance: {pairs: [a, b]}\n", "pairs"),
    ("eval/tune.py", "ks is a number", "ks: 3\n", "ks"),
    ("eval/tune.py", "ks holds text", "ks: [one]\n", "ks"),
    ("decode/generate.py", "sampling is a number", "sampling: 3\n", "sampling"),
    ("decode/generate.py", "k is null", "k: null\n", "k"),
    ("decode/generate.py", "repeated key", "k: 3\nk: 5\n", "k"),
    ("scripts/publish.py", "labels is a text", "labels: mit\n", "labels"),
    ("scripts/export.py", "unknown key", "formats: flat\n", "format"),
]  # fmt: skip
"""(command, what is wrong, the YAML file, what the message names)."""

WORDS = [
    ("train/sample.py", "--no_such_setting 3", "no_such_setting"),
    ("train/sample.py", "--batch_siz 3", "batch_size"),
    ("train/sample.py", "stray", "stray"),
    ("train/sample.py", "--k", "k"),
    ("train/sample.py", "--k ''", "k"),
    ("train/sample.py", "--sources '[{kind: file'", "sources"),
    ("train/sample.py", "--sources ''", "sources"),
    ("train/sample.py", "--sources '[]'", "sources"),
    ("train/sample.py", "--overwrite maybe", "overwrite"),
    ("train/sample.py", "--config ''", "file"),
    ("train/sample.py", "--config", "config"),
    ("train/sample.py", "--out ''", "out"),
    ("train/sample.py", "--target ''", "target"),
    ("train/sample.py", "--engine telepathy", "engine"),
    ("train/sample.py", "--engine openai", "--url"),
    ("train/sample.py", "--engine openai --url ''", "--url"),
    ("train/sample.py", "--engine openai --url localhost:8000/v1", "http://localhost:8000/v1"),
    ("train/sample.py", "--engine openai --url ftp://localhost/v1", "ftp://localhost/v1"),
    ("train/sample.py", "--engine openai --url http:///v1", "http:///v1"),
    ("train/sample.py", "--engine openai --url 'http://local host/v1'", "local host"),
    ("train/sample.py", "--engine openai --url http://[::1/v1", "http://[::1/v1"),
    ("train/sample.py", "--engine openai --url http://localhost:99999/v1", "99999"),
    ("train/sample.py", "--engine openai --url http://me:word@localhost/v1", "OPENAI_API_KEY"),
    ("train/sample.py", "--engine openai --url http://localhost/v1?key=abc", "OPENAI_API_KEY"),
    ("train/sample.py", "--engine openai --url http://127.0.0.1:1/v1", ("127.0.0.1:1", "no server answers")),
    ("train/sample.py", "--engine openai --url http://127.0.0.1:1/v1 --draft ngram", "--draft"),
    ("train/sample.py", "--engine openai --url http://127.0.0.1:1/v1 --origin text", "--origin"),
    ("train/sample.py", "--url http://127.0.0.1:1/v1", "--engine openai"),
    ("train/sample.py", "--model tiny", "--engine openai"),
    ("train/sample.py", "--vllm_python python", "--engine vllm"),
    ("train/sample.py", "--engine openai --url http://127.0.0.1:1/v1 --vllm_args '[-x]'", "--engine vllm"),
    ("train/sample.py", "--engine vllm --url http://127.0.0.1:1/v1", "--engine openai"),
    ("train/sample.py", "--engine vllm --draft ngram", "--draft"),
    ("train/sample.py", "--engine vllm --vllm_python /no/python", "/no/python"),
    ("train/write_prompts.py", "--systems '[]'", "systems"),
    ("train/write_prompts.py", "--systems ''", "systems"),
    ("train/write_prompts.py", "--out ''", "out"),
    ("train/write_prompts.py", "--target ''", "target"),
    ("train/write_prompts.py", "--revision main", "revision"),
    ("train/distill.py", "--out ''", "out"),
    ("train/distill.py", "--data ''", "train/sample.py"),
    ("train/distill.py", "--target ''", "target"),
    ("train/distill.py", "--compare.top 3 --divergence.top 4", "divergence"),
    ("eval/run.py", "--out ''", "out"),
    ("eval/run.py", "--methods '[]' --target ''", "target"),
    ("eval/run.py", "--methods '[{name: a, draft: $lab/causal}, {name: a, draft: $lab/causal}]'", "name"),
    ("eval/run.py", "--methods '[{name: plain}]'", "plain"),
    ("eval/run.py", "--methods '[{name: \"\", draft: $lab/causal}]'", "name"),
    ("eval/run.py", "--tasks '[]'", "task"),
    ("eval/run.py", "--tasks '[{name: all, path: $lab/prompts.txt}]'", "all"),
    ("eval/run.py", "--acceptance.pairs '[[causal]]'", "pairs"),
    ("eval/run.py", "--acceptance.pairs '[[causal, other]]'", "other"),
    ("eval/run.py", "--acceptance.pairs '[[causal, causal]]'", "pairs"),
    ("eval/run.py", "--check_law 100", "check_law"),
    ("eval/run.py", "--compare vllm", "vllm_python"),
    ("eval/run.py", "--compare vllm --vllm_python python --dtype int8", "int8"),
    ("eval/tune.py", "--out ''", "out"),
    ("eval/tune.py", "--methods '[]'", "methods"),
    ("decode/generate.py", "--prompt ''", "prompt"),
    ("decode/generate.py", "--prompt_file $lab/prompts.txt", ("prompt", "prompt_file")),
    ("decode/generate.py", "--revision main", "revision"),
    ("train/sample.py", "--revision main", "revision"),
    ("train/distill.py", "--revision main", "revision"),
    ("eval/run.py", "--revision main", "revision"),
    ("eval/tune.py", "--revision main", "revision"),
    ("train/distill.py", "--draft.init ''", "draft"),
    ("train/distill.py", "--draft.init_config '{a: 1}'", "draft"),
    ("train/distill.py", "--draft.init '' --draft.init_config '{no_such_field: 1}'", "no_such_field"),
    ("train/distill.py", "--draft.lora_rank 4 --draft.init '' --draft.init_config '{hidden_size: 16}'", "lora_rank"),
    ("train/distill.py", "--draft.family eagle3 --draft.taps '[1, 0]' --draft.init ''", "taps"),
    ("train/distill.py", "--on_policy.share 0.5 --draft.family medusa --draft.init ''", "on_policy"),
    ("train/distill.py", "--on_policy.share 0.5 --features $tmp/features", "features"),
    ("train/distill.py", "--publish.repo me/draft", "token"),
    ("train/distill.py", "--publish.repo 'not a name!'", "repo"),
    ("scripts/publish.py", "--repo ''", "repo"),
    ("scripts/publish.py", "--repo '../../etc'", "repo"),
    ("scripts/publish.py", "--repo 'a b'", "repo"),
    ("scripts/publish.py", "--draft ''", "draft"),
    ("scripts/publish.py", "--samples $lab/samples", "samples"),
    ("scripts/publish.py", "--push true", "token"),
    ("scripts/export.py", "--out ''", "out"),
    ("scripts/export.py", "--format ''", "format"),
    ("scripts/export.py", "--draft ''", "draft"),
    ("scripts/check_draft.py", "--engine ''", "engine"),
    ("scripts/check_draft.py", "--draft ''", "draft"),
    ("scripts/referee.py", "--control true", "temperature"),
    ("scripts/audit.py", "--served llama.cpp", "llama.cpp"),
    ("scripts/audit.py", "--tasks '[]'", "tasks"),
    ("eval/report.py", "--folder ''", "report.json"),
    ("train/doctor.py", "--data ''", "--data"),
    ("train/doctor.py", "--data '[]'", "--data"),
    ("eval/advise.py", "--report ''", "file"),
    ("eval/rescore.py", "--log ''", "file"),
]  # fmt: skip
"""(command, arguments, what the message names)."""

FILES = [
    Case("train/sample.py", "--config $tmp/none.yaml", "none.yaml"),
    Case("train/sample.py", "--config=$tmp/none.yaml", "none.yaml"),
    Case("train/sample.py", "--config $tmp/folder", "folder", (folder("folder"),)),
    Case("train/sample.py", "--config $tmp/link.yaml", "link.yaml", (link("link.yaml", "gone.yaml"),)),
    Case("train/sample.py", "--config $tmp/loop.yaml", "loop.yaml", (link("loop.yaml", "loop.yaml"),)),
    Case("eval/report.py", "", "folder", keep_base=False),
    Case("eval/advise.py", "", "report", keep_base=False),
    Case("eval/rescore.py", "", "log", keep_base=False),
    Case("train/doctor.py", "", "--data", keep_base=False),
    Case("scripts/export.py", "", "draft", keep_base=False),
    Case("scripts/check_draft.py", "", "draft", keep_base=False),
    Case("scripts/publish.py", "", "draft", keep_base=False),
    Case("scripts/referee.py", "", "draft", keep_base=False),
    Case("scripts/llamacpp_parity.py", "", "draft", keep_base=False),
    Case("scripts/audit.py", "", "draft", keep_base=False),
    Case("scripts/track_report.py", "", "run", keep_base=False),
]  # fmt: skip


def cases() -> list[Case]:
    from_yaml = []
    for command, what, text, says in CONFIGS:
        keys = () if isinstance(text, bytes) else tuple(re.findall(r"^(\w+):", text, re.MULTILINE))
        steps = (write("c.yaml", text, what),)
        from_yaml.append(Case(command, "--config $tmp/c.yaml", says, steps, without=keys))
    return [*from_yaml, *(Case(*words) for words in WORDS), *FILES]


@pytest.mark.parametrize("case", params(*cases()))
def test_settings_of_the_wrong_shape_are_refused(case: Case, lab: Lab, tmp_path: Path) -> None:
    check(case, lab, tmp_path)
