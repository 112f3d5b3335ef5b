"""The way of an encoder-decoder from prompts to a report, by the real commands; its loss and its samples exactly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from decode.common.chat.render import ChatTemplate
from decode.common.errors import UserError
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.hidden_states import HiddenStateSpec, LMHead
from decode.model.loading import load_target, load_tokenizer
from tests import worlds
from tests.seq2seq import START, Seq2SeqWorld, build, generated, t5_target, tiny_t5
from tests.tiny import noisy, tiny_prompts
from train.data import batching
from train.data.conversations import Prompt, encoder_pair
from train.data.manifest import load_set
from train.data.sample_store import SampleRow
from train.families.causal import CausalTrainer
from train.losses.divergences import forward_kl
from train.losses.objective import Criterion
from train.teacher.live import LiveTeacher, compute_hidden_states

NEW = 24


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Seq2SeqWorld:
    return build(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def data(world: Seq2SeqWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample(world, tmp_path_factory.mktemp("data") / "samples", "--sampling.temperature", 0)


def sample(world: Seq2SeqWorld, out: Path, *more: object) -> Path:
    sources = json.dumps([{"kind": "file", "path": str(world.prompts)}])
    worlds.call(
        "train/sample.py", "--target", world.target, "--sources", sources, "--out", out,
        "--max_new_tokens", NEW, *more,
    ).ok()  # fmt: skip
    return out


def distill(world: Seq2SeqWorld, data: Path, out: Path, *more: object) -> worlds.Done:
    return worlds.call(
        "train/distill.py", "--target", world.target, "--data", data, "--out", out,
        "--loop.steps", 60, "--loop.batch_size", 8, "--loop.lr", 3e-3, "--tracker", "none",
        "--loop.log_every", 1, "--check.prompts", 4, "--check.max_new_tokens", 8, *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(world: Seq2SeqWorld, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "draft"
    distill(world, data, out, "--draft.init", world.draft).ok()
    return out


# ---- samples ----


def test_samples_are_pairs_that_come_apart_exactly(world: Seq2SeqWorld, data: Path) -> None:
    """The encoder's input and the answer are found again by the loss span, and the answer is that of `generate`."""
    manifest, rows = load_set(data)
    assert manifest.encoder_decoder
    assert len(rows) == len(world.texts)
    model = AutoModelForSeq2SeqLM.from_pretrained(world.target)
    tokenizer = load_tokenizer(str(world.target))
    prompts = {tuple(tokenizer(text)["input_ids"]) for text in world.texts}
    for row in rows:
        [(start, end)] = row["loss_spans"]
        prompt, answer = list(row["input_ids"][:start]), list(row["input_ids"][start:end])
        assert tuple(prompt) in prompts
        assert end == len(row["input_ids"])
        assert answer == generated(model, prompt, NEW, [1])
    assert {row["finish_reason"] for row in rows} == {"eos", "length"}


def test_given_answers_are_texts_of_their_own(world: Seq2SeqWorld) -> None:
    tokenizer = load_tokenizer(str(world.target))
    pair = encoder_pair(ChatTemplate(tokenizer), Prompt("x", "hub", "abc", None, 0, "de"))
    assert tokenizer.decode(pair.prompt_segments[0]) == "abc</s>"
    assert tokenizer.decode(pair.replies[0]) == "de</s>"
    with pytest.raises(UserError, match="learns pairs"):
        encoder_pair(ChatTemplate(tokenizer), Prompt("x", "file", "abc", None, 0))


def test_servers_are_refused(world: Seq2SeqWorld, tmp_path: Path) -> None:
    done = worlds.call(
        "train/sample.py", "--target", world.target, "--out", tmp_path, "--engine", "openai",
        "--url", "http://localhost:9/v1",
    )  # fmt: skip
    assert "serves causal targets" in done.error()


# ---- the loss ----


def pair_rows(lengths: list[tuple[int, int]]) -> list[SampleRow]:
    """Random rows of prompts and answers of these lengths."""
    rows: list[SampleRow] = []
    for number, (prompt, answer) in enumerate(lengths):
        [ids] = tiny_prompts(prompt + answer, seed=number)
        rows.append({
            "id": str(number), "source": "", "origin": "target", "input_ids": ids,
            "loss_spans": [[prompt, prompt + answer]], "finish_reason": "eos",
        })  # fmt: skip
    return rows


ROWS = pair_rows([(3, 9), (14, 2), (1, 5), (8, 1)])


@pytest.mark.parametrize("variant", ["t5", "t5-v1.1"])
def test_the_loss_is_that_of_plain_passes(variant: str) -> None:
    """Catches logits of another position, a prompt that reads padding or its answer, tied weights without their scale,
    and a start token that is not there."""
    model = tiny_t5(variant)
    teacher = LiveTeacher(t5_target(model), HiddenStateSpec())
    trainer = CausalTrainer(noisy(model, 0.05), teacher.head, Criterion("forward_kl", None))
    batch = batching.collate(ROWS, 0)
    found = trainer(batch, teacher.get_output(batch))
    found["loss"].backward()
    own, want = noisy(model, 0.05), 0.0
    for row in ROWS:
        [(start, _)] = row["loss_spans"]
        prompt = torch.tensor([row["input_ids"][:start]])
        read = torch.tensor([[START, *row["input_ids"][start:-1]]])
        with torch.no_grad():
            p_logits = model(input_ids=prompt, decoder_input_ids=read).logits[0]
        loss = forward_kl(p_logits, own(input_ids=prompt, decoder_input_ids=read).logits[0]).sum()
        loss.backward()
        want += float(loss.detach())
    assert float(found["loss"].detach()) == pytest.approx(want, rel=1e-4)
    grads = dict(trainer.lm.named_parameters())
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(grads[name].grad, parameter.grad, rtol=1e-3, atol=1e-4)


def test_states_of_training_are_those_that_decoding_drafts_with() -> None:
    """The distribution that training computes for a row's first answer tokens is the decoder's own, step by step."""
    model = tiny_t5()
    target = t5_target(model)
    batch = batching.collate(ROWS, 0)
    states = compute_hidden_states(model, batch, HiddenStateSpec(final=True))
    logits = LMHead(model)(states)
    for number, row in enumerate(ROWS):
        [(start, _)] = row["loss_spans"]
        ids = list(row["input_ids"])
        [output] = decode(target, None, [ids[:start]], max_new_tokens=1)
        assert output.output_ids == [int(logits[number, start - 1].argmax())]


# ---- commands ----


def test_a_draft_is_trained_and_decodes(world: Seq2SeqWorld, data: Path, trained: Path) -> None:
    """The loss falls, and the folder is a T5 that is loaded and drafts exactly."""
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 60
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    target = load_target(str(world.target))
    prompts = [target.tokenizer(text)["input_ids"] for text in world.texts]
    plain = decode(target, None, prompts, max_new_tokens=NEW)
    outputs = decode(target, load_draft(str(trained), target), prompts, k=3, max_new_tokens=NEW)
    assert [o.output_ids for o in outputs] == [o.output_ids for o in plain]


def test_a_report_of_an_encoder_decoder(world: Seq2SeqWorld, trained: Path, tmp_path: Path) -> None:
    """Greedy output equals that of `generate`, which is compared and assisted by the draft, too."""
    methods: list[dict[str, Any]] = [
        {"name": "causal", "draft": str(trained)},
        {"name": "ngram"},
        {"name": "early-exit", "layers": 2},
    ]
    tasks = [{"name": "own", "path": str(world.prompts), "limit": 4}]
    worlds.call(
        "eval/run.py", "--target", world.target, "--methods", json.dumps(methods),
        "--tasks", json.dumps(tasks), "--max_new_tokens", NEW, "--k", 3, "--temperatures", "[0]",
        "--compare", "hf,hf-assisted", "--phase_prompts", 0, "--out", tmp_path / "out",
    ).ok()  # fmt: skip
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    greedy = [m for m in report["methods"] if m["temperature"] == 0 and m["task"] == "all"]
    assert {m["name"] for m in greedy} == {"plain", "causal", "ngram", "early-exit"}
    assert all(m["lossless"]["greedy_identical"] and not m["failed"] for m in greedy)
    engines = [e for e in report["engines"] if e["temperature"] == 0 and e["task"] == "all"]
    assert [(e["name"], e["same_as_ours"], e["failed"]) for e in engines] == [
        ("plain", 4, []), ("causal", 4, []),
    ]  # fmt: skip


def test_generate_prints_the_answer(world: Seq2SeqWorld) -> None:
    text = world.texts[0]
    target = load_target(str(world.target))
    [output] = decode(target, None, [target.tokenizer(text)["input_ids"]], max_new_tokens=NEW)
    done = worlds.call(
        "decode/generate.py", "--target", world.target, "--draft", world.draft, "--prompt", text,
        "--max_new_tokens", NEW,
    ).ok()  # fmt: skip
    tokenizer = target.tokenizer
    pieces = [tokenizer.decode([token], skip_special_tokens=True) for token in output.output_ids]
    assert done.out.startswith(f"{text}\n")
    assert f"{len(output.output_ids)} tokens" in done.err
    assert sum(map(len, pieces)) > 0


def test_layers_and_new_configs_make_drafts(
    world: Seq2SeqWorld, data: Path, tmp_path: Path
) -> None:
    for name, settings in {
        "layers": ["--draft.layers", "[0, 2]"],
        "layers of init": ["--draft.layers", "[0]", "--draft.init", world.draft],
        "init_config": ["--draft.init_config", "{num_decoder_layers: 1, num_layers: 1}"],
    }.items():
        distill(world, data, tmp_path / name, *settings, "--loop.steps", 2).ok()
        target = load_target(str(world.target))
        decode(target, load_draft(str(tmp_path / name), target), [[5, 6, 1]], k=2, max_new_tokens=4)


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("--supervise", "all", "supervise: set it to answers"),
        ("--loop.pack", "true", "loop.pack: set it to false"),
        ("--draft.family", "medusa", "draft.family: train a causal draft"),
        ("--draft.init", "assets/draft", "tokenizer"),
        ("--draft.layers", "[1]", "keep layer 0"),
    ],
)
def test_what_does_not_apply_is_refused(
    world: Seq2SeqWorld, data: Path, tmp_path: Path, setting: str, value: str, said: str
) -> None:
    init = [] if setting == "--draft.init" else ["--draft.init", world.draft]
    done = distill(world, data, tmp_path / "out", *init, setting, value)
    assert said in done.error()
