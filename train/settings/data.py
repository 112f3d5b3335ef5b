"""What training reads: sources of prompts and their filters, sampled sets, and a server of the target's states."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from decode.common.chat.choice import TemplateSetting
from decode.common.errors import UserError
from decode.common.published import Folder
from decode.common.ranges import Count, CountOrZero, Seed, Share, above, at_least, zero_or

TurnSelection = Literal["last", "all"]


@dataclass
class PromptSource:
    """One place that prompts come from."""

    kind: Literal["bundled", "stdlib", "file", "hub"]
    """bundled: this repository's prompts; stdlib: excerpts of Python's standard library; file: a file or a folder; hub:
    a data set of the Hugging Face Hub."""

    path: str = ""
    """bundled: code, prose, arithmetic or all; file: .jsonl, .json, .txt with a blank line between prompts (each also
    .gz or .zst) or .parquet, a folder of such files, or one of `save_to_disk`; hub: name of a data set. A row is read
    as the first of these that it holds: messages, conversations, conversation (chats, maybe as JSON); prompt,
    instruction with input, question, query (with their answers, for origin text); text. Its tools are offered to the
    target, and the chat template gets the arguments in its chat_template_kwargs. Agents' rollouts are rows too: logged
    requests, verifiers' traces, and for origin text token ids with a mask (docs/data_forms.md)."""

    split: str = "train"
    """hub and folders: which split of the data set. Of a folder in which no file is named after it all are read."""

    config: str | None = None
    """hub: which configuration of the data set; null: its only one."""

    column: str = ""
    """hub and file: column that holds the text, or the messages of a chat; empty: as `path` says."""

    response: str = ""
    """hub and file, for origin text: column that holds the answer; empty: as `path` says."""

    streaming: bool = False
    """hub: read rows as they are downloaded, without storing them. A limit then chooses among nearby rows only."""

    limit: Count | None = None
    """At most this many prompts, chosen at random by the seed; null takes all. stdlib requires a limit, but
    for origin text, which takes whole modules."""

    samples: Annotated[int, at_least(1, 100_000)] = 1
    """Answers to sample for each prompt."""


@dataclass
class FilterConfig:
    """Which prompts are dropped, besides those that overlap evaluation prompts."""

    min_prompt: Count = 1
    """Shortest prompt in tokens."""
    max_prompt: CountOrZero = 0
    """Longest prompt in tokens; 0: the target's context length."""
    min_answer: Count = 1
    """Fewest tokens of all replies together; rows with fewer are kept as answered, without loss spans."""
    near_duplicates: Annotated[float, zero_or(0.6, 1)] = 0.0
    """A prompt is dropped if its similarity to an earlier one, the share of 5-word shingles in common, is at least
    this: 0.6 to 1; 0 drops equal prompts only."""

    def __post_init__(self) -> None:
        if 0 < self.max_prompt < self.min_prompt:
            raise UserError(
                f"filters.min_prompt {self.min_prompt} is above filters.max_prompt {self.max_prompt}: lower it"
            )


@dataclass
class MixturePart:
    """One sampled set of a mixture."""

    path: Folder
    """Folder of the sampled set."""
    weight: Annotated[float, above(0)] = 1.0
    """Its share of the training rows, relative to the weights of the other sets."""
    limit: CountOrZero = 0
    """Rows to take from it, chosen by the seed of the training; 0: all. The rows of a lower limit are among those of a
    higher one, and runs with different limits share stored features."""


Supervised = Literal["answers", "all"]
DataSpec = Folder | list[MixturePart]
"""The folder of one sampled set, or several with weights."""


@dataclass
class StatesServerConfig:
    url: str = ""
    """The address of a server that extracts the target's hidden states (train/states_server.py starts one), such as
    http://localhost:8000/v1; empty: the target runs in this process. The target's layers are not loaded here."""
    folder: str = ""
    """The folder in which the server writes hidden states, as it is seen from here. Files are deleted when read."""
    model: str = ""
    """The server's name for the target; empty: the only model that it serves."""
    concurrency: Annotated[int, at_least(1, 4096)] = 16
    """Requests that each process has open at the same time."""
    timeout: Annotated[float, above(0, 86_400)] = 600.0
    """Seconds until a request is given up and tried again."""
    retries: CountOrZero = 8
    """How often a request is repeated, after waits that double from 1 to 60 seconds."""


@dataclass
class DoctorConfig:
    target: str = "assets/target"
    """The model that the data is for: a folder, a GGUF file or a Hub name. Its tokenizer, template and config are read,
    no weights."""
    revision: str | None = None
    """Commit, tag or branch of a target on the Hub."""
    template: TemplateSetting | None = None
    """Which chat template, and its arguments, as in train/sample.py; null: those that the manifest of each set names,
    and for `sources` those of the first set, if there is one."""
    data: DataSpec = ""
    """A sampled set from train/sample.py, or several: [{path: one}, {path: other}], read whole. May stand first."""
    sources: list[PromptSource] = field(default_factory=list)
    """Prompts before sampling, as in train/sample.py. With `data` too, rows are compared with the prompts they
    answer, which also shows a wrong boundary where the target has no chat template."""
    decontaminate: str | list[str] = ""
    """Files or folders with evaluation prompts besides the bundled ones."""
    max_length: Count = 4096
    """Tokens of a row that training reads: --loop.max_length of train/distill.py, whose default is the family's."""
    worth: Share = 0.05
    """From this share of the rows or labels on a defect costs something (or stops, if it is grave)."""
    rows: CountOrZero = 2000
    """Rows of each set, chosen by the seed, whose text is rendered again; 0: all."""
    show: CountOrZero = 3
    """Samples to show, those of the gravest findings first."""
    show_tokens: Count = 300
    """Tokens shown of a sample, around where its labels begin."""
    html: str = ""
    """File for a page with findings and samples; empty: the terminal shows them."""
    out: str = ""
    """File for the JSON of the last line; empty: none."""
    strict: bool = False
    """Exit code 1 if there is a finding that stops or costs."""
    seed: Seed = 0
