"""The whole way from sources to tokenised prompts: one prompt after the other gives what step after step would."""

import itertools
import json
import random
from array import array
from pathlib import Path

import pytest

from decode.common.chat.render import ChatTemplate
from tests.worlds import byte_tokenizer
from train.data.conversations import Prompt, encode_prompt, prompt_text
from train.data.filters import EvaluationOverlap, NearDuplicates
from train.data.prompt_pipeline import TargetTokenizer, load_prompts
from train.data.sources import REPEATS, ReadLog, evaluation_texts, stream_prompts
from train.sampling.config import SampleConfig
from train.settings.data import FilterConfig, PromptSource


def texts() -> list[str]:
    """500 texts: some are equal, some nearly so, some are long, short or repeat what is evaluated."""
    rng = random.Random(0)
    found = [
        " ".join(f"w{rng.randrange(300)}" for _ in range(rng.randint(1, 60))) for _ in range(420)
    ]
    found += [text.upper() for text in rng.sample(found, 40)] + rng.sample(found, 20)
    found += [f"before {text} after" for text in rng.sample(found, 20)]
    rng.shuffle(found)
    return found


@pytest.mark.parametrize("limit", [None, 300])
def test_prompts_are_kept_and_counted_as_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """Bug: samples of one prompt part, a batch of the tokenizer mixes prompts up, or a prompt that another filter
    drops makes later ones near duplicates."""
    monkeypatch.setattr("train.data.prompt_pipeline.TOKENIZED_TOGETHER", 7)
    every = texts()
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": x}) + "\n" for x in every))
    (tmp_path / "b.txt").write_text("\n\n".join(every[::5] + ["only here"]))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "\n".join(every[:3])}) + "\n")
    s = SampleConfig(
        sources=[
            PromptSource("file", str(tmp_path / "a.jsonl"), limit=limit, samples=2),
            PromptSource("file", str(tmp_path / "b.txt"), limit=limit),
        ],
        filters=FilterConfig(min_prompt=30, max_prompt=220, near_duplicates=0.8),
        decontaminate=str(tmp_path / "eval.jsonl"),
    )
    tokenizer = byte_tokenizer()
    reader = TargetTokenizer("tiny", None, tokenizer, "", 512, frozenset({0}))
    found, dropped = load_prompts(s, reader, ReadLog())

    log = ReadLog()
    read = list(stream_prompts(s.sources, s.seed, log))
    evaluation = EvaluationOverlap(evaluation_texts(s.decontaminate))
    clean = [prompt for prompt in read if not evaluation.overlaps(prompt_text(prompt))]
    ids = {prompt.id: encode_prompt(ChatTemplate(tokenizer), prompt) for prompt in clean}
    fitting = [prompt for prompt in clean if 30 <= len(ids[prompt.id]) <= 220]
    unlike = NearDuplicates(0.8)
    kept: list[Prompt] = []
    for _, samples in itertools.groupby(fitting, lambda prompt: prompt.content_id):
        first, *others = samples
        kept += [first, *others] if unlike.add(prompt_text(first)) else []
    assert [(prompt.id, prompt.source) for prompt in found] == [(p.id, p.source) for p in kept]
    assert [prompt.conversation.prompt_segments for prompt in found] == [
        (array("i", ids[prompt.id]),) for prompt in kept
    ]
    assert dropped == {
        "dropped_as_repeats": log.dropped[REPEATS],
        "dropped_as_evaluation": len(read) - len(clean),
        "dropped_by_length": len(clean) - len(fitting),
        "dropped_as_near_duplicates": len(fitting) - len(kept),
    }
    assert min(dropped.values()) > 0
