"""Which layers a small LM keeps (draft.keep_layers): one after the other goes that costs least acceptance.

A model without a layer is tried on the same answers of the target each time, and measured by the acceptance to be
expected of its drafts there, the mean of the sum of min(p, q) over the tokens of its vocabulary. Nothing is trained
meanwhile. `layer_choice.json` in the run's folder is written after every layer, so that a run that was stopped goes on
from there, and a resumed one does not choose again.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from decode.checkpoints.draft_folder import ChosenLayers
from decode.common import files
from decode.common.errors import UserError
from decode.common.progress import progress_bars
from decode.common.typed_json import from_json
from decode.model.cut_layers import check_cut, left_out, output_counts, with_replaced
from decode.model.hidden_states import HiddenStateSpec, LogitTransform
from decode.model.layer_stack import decoder_config, layer_stack
from train.data import batching, vocab_mapping
from train.data.batching import Batch
from train.data.mixture import Mixture
from train.data.sample_store import SampleRow
from train.families.causal import TrainableCausal, output_projection
from train.losses import chunked_sums, divergences
from train.teacher.feature_extraction import CPU_MICROBATCH_TOKENS, MICROBATCH_TOKENS, microbatches
from train.teacher.live import compute_hidden_states
from train.trainer import checkpoint, collective
from train.trainer.settings import DistillConfig

CHOICE_FILE = "layer_choice.json"


@dataclass
class LayerChoice:
    """What was measured so far."""

    depth: int
    """Layers of the whole model."""
    tokens: int
    """On which each layer was tried."""
    acceptance: float
    """Of the whole model."""
    removed: list[dict[str, Any]] = field(default_factory=list)
    """{layer, acceptance without it and those before it}, in the order of removal."""

    @property
    def kept(self) -> list[int]:
        gone = {one["layer"] for one in self.removed}
        return [i for i in range(self.depth) if i not in gone]

    def table(self) -> Table:
        """The order of removal, with the acceptance after each."""
        title = f"layers that go, and acceptance on {self.tokens:,} tokens without them"
        table = Table("layers", "without", "acceptance", title=title)
        table.add_row(f"{self.depth}", "", f"{self.acceptance:.3f}")
        for number, one in enumerate(self.removed, 1):
            row = (self.depth - number, one["layer"], f"{one['acceptance']:.3f}")
            table.add_row(*map(str, row))
        return table


def settle_layers(
    s: DistillConfig,
    accelerator: Accelerator,
    trainable: TrainableCausal,
    rows: Mixture,
    inputs: dict[str, Any],
    console: Console,
) -> list[int]:
    """Cuts the draft to draft.keep_layers layers and returns their numbers: those that an earlier start of this run
    chose from the same `inputs`, or that its checkpoints have, or else those that are chosen now.

    `s` are the settings of train/distill.py. Every rank must call it.
    """
    out, ids, draft = Path(s.out), trainable.ids, trainable.settings
    key = {
        **inputs,
        "keep_layers": draft.keep_layers,
        "choice_tokens": draft.choice_tokens,
        "supervise": s.supervise,
        "seed": s.seed,
        "vocabulary": None if ids is None else vocab_mapping.digest(ids),
    }
    choice = None
    with collective.raise_on_all_ranks(accelerator):
        if accelerator.is_main_process:
            choice = read_choice(out, key)
    choice = collective.broadcast(choice)

    def save(found: LayerChoice) -> None:
        if accelerator.is_main_process:
            content = {"key": key, "choice": asdict(found)}
            files.write_atomically(out / CHOICE_FILE, json.dumps(content, indent=1) + "\n")

    if choice is None or len(choice.kept) > draft.keep_layers:
        trials = LayerTrials(trainable, choose_texts(rows, draft.choice_tokens, s.seed))
        choice = trials.choose(draft.keep_layers, choice, accelerator, console, save)
    console.print(choice.table())
    trainable.keep_layers(choice.kept)
    trainable.metadata["layer_choice"] = from_json(
        ChosenLayers, {**asdict(choice), "kept": choice.kept}
    )
    return choice.kept


def spread_layers(depth: int, keep: int) -> list[int]:
    """`keep` of `depth` layers at even distances."""
    return [(2 * i + 1) * depth // (2 * keep) for i in range(keep)]


def read_choice(out: Path, key: dict[str, Any]) -> LayerChoice | None:
    """The choice in the run's folder, perhaps not finished; None if there is none, or one of other inputs or settings
    and no checkpoint. UserError if the checkpoints have other layers than are asked for, or nothing says which."""
    there, trained = (out / CHOICE_FILE).is_file(), checkpoint.latest_checkpoint(out)
    if trained and not there:
        raise UserError(
            f"{trained} has layers of which no {CHOICE_FILE} tells: restore it or drop draft.keep_layers, "
            "--overwrite true starts over"
        )
    if not there:
        return None
    found = files.read_json_object(out / CHOICE_FILE, "a choice of layers", ("key", "choice"))
    try:
        choice = LayerChoice(**found["choice"])
        count = len(choice.kept)
    except (TypeError, KeyError) as error:
        raise UserError(
            f"{out / CHOICE_FILE} is damaged: restore it, or --overwrite true"
        ) from error
    if trained and count != key["keep_layers"]:
        raise UserError(
            f"{trained} has {count} layers, not draft.keep_layers {key['keep_layers']}: --overwrite true starts over, "
            "--out names another folder"
        )
    return choice if trained or found["key"] == key else None


def choose_texts(rows: Mixture, tokens: int, seed: int) -> list[SampleRow]:
    """The first samples that training takes, with at least `tokens` labels together if there are as many."""
    texts: list[SampleRow] = []
    while tokens > 0 and len(texts) < len(rows):
        texts.append(rows.row_at(len(texts), seed))
        tokens -= batching.supervised_token_count(texts[-1:])
    return texts


class LayerTrials:
    """Tries an untrained draft without some of its layers, on the same texts each time."""

    def __init__(self, trainable: TrainableCausal, texts: Sequence[SampleRow]):
        assert trainable.teacher is not None
        self.lm, self.ids, self.teacher = trainable.lm, trainable.ids, trainable.teacher
        self.lm.eval()  # without dropout
        self.layers = list(layer_stack(self.lm))
        self.outputs = output_counts(self.lm, self.layers)
        self.tokens = batching.supervised_token_count(texts)
        most = CPU_MICROBATCH_TOKENS if self.lm.device.type == "cpu" else MICROBATCH_TOKENS
        ordered = sorted(texts, key=lambda row: len(row["input_ids"]))
        self.groups = list(microbatches(ordered, most))

    @torch.no_grad()
    def choose(
        self,
        keep: int,
        choice: LayerChoice | None,
        accelerator: Accelerator,
        console: Console,
        save: Callable[[LayerChoice], None],
    ) -> LayerChoice:
        """`choice`, begun anew or gone on with until `keep` layers are left; `save` gets it after each removal.

        The ranks share the texts. UserError for a model whose layers cannot be tried one by one.
        """
        depth, done = len(self.layers), len(choice.removed) if choice else 0
        own = self.groups[accelerator.process_index :: accelerator.num_processes]
        batches = [batching.collate(group, pad_id=0).to(self.lm.device) for group in own]
        rows = [self.teacher.get_output(batch).head_inputs[batch.loss_mask] for batch in batches]
        with collective.raise_on_all_ranks(accelerator):
            self.check_replay(batches)
        tries = sum(range(keep + 1, depth + 1 - done))
        console.print(
            f"draft.keep_layers: {depth} layers to {keep}, {tries} models to try on {self.tokens:,} tokens"
        )
        with progress_bars(console, disable=not accelerator.is_main_process) as bars:
            task = bars.add_task("layers tried", total=tries * len(batches))
            while choice is None or len(choice.kept) > keep:
                kept = choice.kept if choice else list(range(depth))
                sums = [0.0] * (depth + 1)
                for batch, teacher in zip(batches, rows, strict=True):
                    found = self.overlaps(batch, teacher, kept, lambda: bars.advance(task))
                    sums = [a + b for a, b in zip(sums, found, strict=True)]
                # The same sum in the same order on every rank.
                sums = [
                    sum(parts) / self.tokens for parts in zip(*gather_object([sums]), strict=True)
                ]
                choice = choice or LayerChoice(depth, self.tokens, sums[depth])
                layer = self.cheapest(kept, sums)
                choice.removed.append({"layer": layer, "acceptance": sums[layer]})
                save(choice)
        self.lm.train()
        assert choice is not None
        return choice

    def cheapest(self, kept: Sequence[int], acceptance: Sequence[float]) -> int:
        """The layer without which acceptance is highest, of those without which a config describes the model."""
        refusal: UserError | None = None
        for layer in sorted(kept, key=acceptance.__getitem__, reverse=True):
            try:
                check_cut(self.lm.config, [i for i in kept if i != layer])
                return layer
            except UserError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def overlaps(
        self, batch: Batch, teacher: Tensor, kept: Sequence[int], note: Callable[[], None]
    ) -> list[float]:
        """[depth + 1]: sums of min(p, q) over the supervised tokens of `batch`, of the model that has the layers
        `kept` without one more, by its number, and at the end of that with all of them. `teacher` are the rows from
        which the target's logits are computed; `note` is called after each model."""
        depth = len(self.layers)
        present = with_replaced(self.lm, self.gone(kept))
        taps = HiddenStateSpec(tuple(kept), final=True)
        states = compute_hidden_states(present, batch, taps)
        width = decoder_config(self.lm).hidden_size
        *inputs, final = states.split(
            [width] * len(kept) + [states.shape[-1] - width * len(kept)], -1
        )
        finals = {depth: final[batch.loss_mask]}
        for layer, state in zip(kept, inputs, strict=True):
            model = self.from_layer(layer + 1, state, kept)
            finals[layer] = self.final_states(model, batch)
            note()
        sums = [0.0] * (depth + 1)
        project, selected = output_projection(self.lm, self.ids)
        finish = LogitTransform(self.lm)
        size = chunked_sums.max_chunk_rows(self.lm.get_output_embeddings().weight.shape[0])
        for start in range(0, len(teacher), size):
            some = slice(start, start + size)
            p = divergences.target_log_probs(self.teacher.head(teacher[some]), self.ids)
            for number, rows in finals.items():
                q_logits = finish(project(rows[some], *selected))
                pair = divergences.pair_log_probs(p, q_logits)
                sums[number] += float(divergences.acceptance.of(pair).double().sum())
        return sums

    def gone(self, kept: Sequence[int]) -> dict[int, nn.Module]:
        """What takes the place of the layers that are not `kept`."""
        every = enumerate(zip(self.layers, self.outputs, strict=True))
        return {i: left_out(layer, count) for i, (layer, count) in every if i not in kept}

    def from_layer(self, first: int, state: Tensor, kept: Sequence[int]) -> Any:
        """A model that begins at layer `first`, with `state` [B, T, H] as what comes in there."""
        replaced = self.gone([i for i in kept if i >= first])
        return with_replaced(
            self.lm, replaced | {0: left_out(self.layers[0], self.outputs[0], state)}
        )

    def final_states(self, model: Any, batch: Batch) -> Tensor:
        """[N, H] at the supervised positions."""
        return compute_hidden_states(model, batch, HiddenStateSpec(final=True))[batch.loss_mask]

    def check_replay(self, batches: Sequence[Batch]) -> None:
        """UserError unless a model that begins in the middle computes what the whole one does: then its layers pass
        nothing to each other but hidden states."""
        first = len(self.layers) // 2
        for batch in batches[:1]:
            states = compute_hidden_states(self.lm, batch, HiddenStateSpec((first,), final=True))
            width = decoder_config(self.lm).hidden_size
            again = self.final_states(
                self.from_layer(first, states[..., :width], range(len(self.layers))), batch
            )
            if not torch.allclose(again, states[batch.loss_mask][:, width:], rtol=1e-3, atol=1e-3):
                kind = decoder_config(self.lm).model_type
                raise UserError(
                    f"draft.keep_layers: layers of a {kind} model pass more than hidden states to each other, and none "
                    "can be tried alone: name those that stay in draft.layers"
                )
