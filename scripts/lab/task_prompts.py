"""Prompts like those of GSM8K, HumanEval and CNN/DailyMail, on which a draft for such tasks is trained.

    python scripts/lab/task_prompts.py --out outputs/smollm2/prompts
    python scripts/lab/task_prompts.py --out outputs/smollm2/summaries --articles outputs/smollm2/articles

The first command writes math.jsonl (GSM8K's training questions), code.jsonl (functions of Python's standard library:
name, parameters and docstring) and articles.jsonl (news to be written). The second takes the target's answers to
articles.jsonl, a sampled set, and writes summaries.jsonl, which asks for a summary of each.
"""

import ast
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.files import parse_jsonl, read_text, write_atomically
from decode.common.ranges import CountOrZero
from decode.common.run_dir import RunSettings, open_run
from eval.tasks.row_files import load_hub_dataset
from train.data import python_corpus

COMMAND = "scripts/lab/task_prompts.py"
OWNED_FILES = ("math.jsonl", "code.jsonl", "articles.jsonl", "summaries.jsonl")
MATH = (
    "{text}",
    "{text}",
    "Question: {text}\nAnswer:",
    "Solve this problem step by step. {text}",
    "{text} Show your reasoning, then give the answer.",
)
CODE = (
    "Complete this Python function. Answer with one code block that holds the whole function and its imports.\n\n"
    "```python\n{text}```",
    "Complete the code I provided.\n\n{text}",
    "Write this function in Python:\n\n```python\n{text}```",
    "Implement the following function and explain how it works.\n\n{text}",
)
ARTICLES = (
    "Write a news article about {event} in {place}.",
    "Write a newspaper report of about 300 words about {event} in {place}. Quote two people.",
    "You are a reporter in {place}. Report on {event}.",
    "Write a detailed news story: {event}, {place}.",
)
SUMMARIES = (
    "Summarize the following article in two or three sentences.\n\n{text}",
    "Summarize: {text}",
    "{text}\n\nTL;DR:",
    "Write a short summary of this text.\n\n{text}",
    "Give me the key points of this article:\n\n{text}",
    "Article: {text}\n\nSummarize the article in three sentences.\nSummary:",
)
PLACES = (
    "Manchester", "Lagos", "Osaka", "Toronto", "Lima", "Nairobi", "Denver", "Glasgow", "Perth", "Warsaw",
    "Mumbai", "Hanoi", "Chicago", "Dublin", "Oslo", "Athens", "Bogota", "Seattle", "Lyon", "Jakarta",
    "Boston", "Madrid", "Cairo", "Austin", "Helsinki", "Naples", "Karachi", "Quito", "Leeds", "Tunis",
)  # fmt: skip
EVENTS = (
    "a football club that changed its coach after a run of defeats",
    "a court case about a stolen painting",
    "a storm that closed schools and roads",
    "a new bridge that opened late and over budget",
    "a mayor who resigned after an inquiry",
    "a hospital that found a better way to treat burns",
    "a fire in an old factory",
    "a strike of bus drivers",
    "an election decided by a few hundred votes",
    "a dog that found its way home after two years",
    "a singer who returns to the stage after an illness",
    "a flood that forced families from their homes",
    "a school that bans telephones",
    "a company that plans to cut a thousand jobs",
    "a police search for a missing hiker",
    "a tennis player's first big title",
    "a scientist who studies whales",
    "a museum that lost part of its roof",
    "a train crash without deaths",
    "a vaccine trial with good results",
    "a dispute over a new runway",
    "a family that won the lottery",
    "a chef accused of fraud",
    "a bank that was attacked by hackers",
    "a volcano that began to smoke",
    "a charity run across the country",
    "a film festival and its winner",
    "a shortage of nurses",
    "a zoo's newborn elephant",
    "a trial of cars that drive themselves",
)


@dataclass
class TaskPromptsConfig(RunSettings):
    out: str = "outputs/task_prompts"
    """Folder of the prompt files, one chat a line."""
    math: str = "openai/gsm8k"
    """Where the questions are: a data set of the Hub, or a .jsonl file with `question` on each line."""
    math_count: CountOrZero = 1500
    code_count: CountOrZero = 1200
    article_count: CountOrZero = 480
    articles: str = ""
    """Folder of the sampled set of answers to articles.jsonl; given, only summaries.jsonl is written."""
    resume: bool = False
    """Write into `out` again although the settings differ."""


def read_columns(source: str, *columns: str) -> list[tuple[str, ...]]:
    """These texts of each row of a data set of the Hub or a .jsonl file. UserError if a row lacks one."""
    if source.endswith(".jsonl"):
        rows = [row for _, row in parse_jsonl(read_text(Path(source)), source)]
    else:
        rows = list(load_hub_dataset(source, "main", "train"))
    for column in columns:
        if not all(isinstance(row, dict) and isinstance(row.get(column), str) for row in rows):
            raise UserError(f"{source}: each row needs a text `{column}`")
    return [tuple(row[column] for column in columns) for row in rows]


def function_stubs() -> list[str]:
    """Functions of the standard library without their bodies, each once: HumanEval asks for such bodies.

    They are documented in 60 to 700 characters and have at most 40 lines.
    """
    stubs = set()
    for source in python_corpus.read_modules(False).values():
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
                continue
            text, length = ast.get_docstring(node) or "", (node.end_lineno or 0) - node.lineno
            if not 60 <= len(text) <= 700 or '"""' in text or length > 40:
                continue
            for group in (node.args.posonlyargs, node.args.args):
                group[:] = [a for a in group if a.arg not in ("self", "cls")]
            quoted = f'"""{text}' + ('\n"""' if "\n" in text else '"""')
            body = "\n".join(f"    {line}" if line else "" for line in quoted.splitlines())
            stubs.add(f"def {node.name}({ast.unparse(node.args)}):\n{body}\n")
    return sorted(stubs)


def read_answers(folder: Path) -> list[str]:
    """The texts that the target wrote in a sampled set, without special tokens."""
    from decode.model.loading import load_tokenizer  # these load torch: --help does without
    from train.data import manifest

    found, rows = manifest.load_set(folder)
    tokenizer = load_tokenizer(found.target)
    texts = []
    for row in rows:
        for start, end in row["loss_spans"]:
            ids = list(row["input_ids"])[start:end]
            texts.append(str(tokenizer.decode(ids, skip_special_tokens=True)).strip())
    return texts


def ask(styles: Sequence[str], texts: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """Up to `count` of `texts`, chosen at random, each in one of the styles of asking."""
    chosen = rng.sample(list(texts), min(count, len(texts)))
    return [rng.choice(styles).format(text=text) for text in chosen]


def ask_articles(count: int, rng: random.Random) -> list[str]:
    pairs = [(event, place) for event in EVENTS for place in PLACES]
    chosen = rng.sample(pairs, min(count, len(pairs)))
    return [rng.choice(ARTICLES).format(event=event, place=place) for event, place in chosen]


def main(s: TaskPromptsConfig) -> None:
    rng = random.Random(s.seed)
    files: dict[str, list[str]]
    if s.articles:
        texts = read_answers(Path(s.articles))
        files = {"summaries.jsonl": ask(SUMMARIES, texts, len(texts), rng)}
    else:
        files = {
            "math.jsonl": ask(
                MATH, [text for (text,) in read_columns(s.math, "question")], s.math_count, rng
            ),
            "code.jsonl": ask(CODE, function_stubs(), s.code_count, rng),
            "articles.jsonl": ask_articles(s.article_count, rng),
        }
    with open_run(s, COMMAND, OWNED_FILES, [s.math, s.articles]) as run:
        for name, prompts in files.items():
            chats = ({"messages": [{"role": "user", "content": prompt}]} for prompt in prompts)
            write_atomically(run.path / name, "".join(json.dumps(chat) + "\n" for chat in chats))
    print(json.dumps({name: len(prompts) for name, prompts in files.items()}))


if __name__ == "__main__":
    run_command(main, TaskPromptsConfig, __doc__)
