"""An exit of the target after its first layers, trained while the target stays as it is (after LayerSkip).

At position t the exit reads the target's own state entering layer E and learns the distribution that the whole target
gives there. It is trained in one step, without a training-time test: a drafted token's state comes from the same E
layers over the drafted tokens before it, and wherever a drafted position counts these tokens were accepted, so that
they are the text. Only behind a rejected token are states others than the ones trained on, and nothing there counts.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from decode.checkpoints import layouts
from decode.drafts import early_exit
from decode.drafts.base import Draft
from decode.drafts.early_exit import EarlyExitDraft, ExitAdapter, copy_final_norm
from decode.model.hidden_states import LMHead
from decode.model.layer_stack import check_exit, with_head_rows
from decode.model.loading import Target
from train.data import vocab_mapping
from train.data.batching import Batch
from train.families.alignment import Alignment
from train.families.base import (
    FamilyContext,
    TrainableDraft,
    check_widths,
    load_saved_config,
    matrix_parameters,
    model_dtype,
    vocabulary_facts,
)
from train.families.head_loss import loss_and_metrics
from train.families.settings.base import DEFAULT_VOCAB, vocab_size
from train.families.settings.heads import LayerSkipSettings
from train.losses import chunked_sums
from train.losses.objective import Criterion
from train.teacher.live import TeacherOutput


def build_exit(context: FamilyContext, s: LayerSkipSettings) -> TrainableDraft:
    counts = vocab_mapping.count_tokens(context.rows, context.target.runner.vocab_size)
    adapter = init_adapter(s, context.target, context.device, counts)
    draft = TrainableExit(context, adapter)
    draft.metadata = vocabulary_facts(adapter.ids, counts)
    return draft


class TrainableExit(TrainableDraft):
    """An exit adapter in training on a frozen target."""

    def __init__(self, context: FamilyContext, adapter: ExitAdapter):
        model = context.target.runner.model
        self.net, self.target = adapter, context.target
        self.teacher = context.teacher(adapter.aux_layers)
        head = LMHead(model if adapter.ids is None else with_head_rows(model, adapter.ids))
        self.model = ExitTrainer(adapter, head, self.teacher.head, context.criterion())
        self.muon_parameters = matrix_parameters(adapter)
        self.metadata = {}

    def to_draft(self) -> Draft:
        return EarlyExitDraft(self.target, self.net.layers, adapter=self.net)

    def save(self, folder: Path) -> None:
        layouts.save_heads(
            folder, self.net.config, self.net, model_dtype(self.target), self.net.ids
        )


class ExitTrainer(nn.Module):
    """The loss of an ExitAdapter over the target's states entering its layer, as a module.

    `draft_head` projects to the draft's vocabulary, `head` to the target's.
    """

    def __init__(
        self,
        net: ExitAdapter,
        draft_head: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        criterion: Criterion,
    ):
        super().__init__()
        self.net, self.draft_head, self.head, self.criterion = net, draft_head, head, criterion

    def forward(self, batch: Batch, output: TeacherOutput) -> dict[str, Tensor]:
        valid = supervised_positions(batch)
        inputs = [output.head_inputs[valid], output.features[valid]]  # [N, P], [N, H]

        def sums(teacher: Tensor, states: Tensor) -> dict[str, Tensor]:
            every = torch.ones(len(states), 1, dtype=torch.bool, device=states.device)
            logits = [self.logits(states)]
            return loss_and_metrics(
                self.criterion, self.head(teacher), logits, every, every.float(), self.net.ids
            )

        size = chunked_sums.max_chunk_rows(self.net.config["vocab_size"])
        return chunked_sums.sums_in_chunks(sums, inputs, size)

    def logits(self, states: Tensor) -> Tensor:
        """[N, Vd] from the target's states [N, H] entering the exit's layer."""
        return self.draft_head(self.net(states))


def supervised_positions(batch: Batch) -> Tensor:
    """[B, T] bool: the positions t whose token t + 1 the target wrote."""
    return Alignment(batch.input_ids, batch.loss_mask, 1, batch.documents).causal().valid


def init_adapter(s: LayerSkipSettings, target: Target, device: str, counts: Tensor) -> ExitAdapter:
    """A saved adapter, or a new one that drafts as the plain early exit does, the most frequent tokens of `counts`."""
    check_widths(target)
    own, vocab = target.runner.config, target.runner.vocab_size
    if s.init:
        s.continued(load_saved_config(s.init, s.family), own.num_hidden_layers)
        return early_exit.load_adapter(s.init, target, device, "float32")
    ids = vocab_mapping.build(counts, vocab_size(s.vocab, vocab, DEFAULT_VOCAB), sorted(target.eos))
    config = s.new_config(own, vocab, vocab if ids is None else len(ids))
    check_exit(config["exit_layer"], own.num_hidden_layers)
    return ExitAdapter(config, copy_final_norm(target.runner.model), ids).to(device)
