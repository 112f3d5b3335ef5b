"""A draft family that stands outside of the tree: a bigram table. It imports nothing of the tests."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from decode.checkpoints import layouts
from decode.checkpoints.draft_folder import check_target
from decode.common.published import Word
from decode.drafts.base import Draft, DraftContext, Proposal
from decode.drafts.drafting import build_tree_plan, draft_tokens
from decode.drafts.registry import DraftFamily, register_family
from decode.model.kv_cache import TreeNodes
from decode.model.loading import DTYPES, Target
from train.data.batching import Batch
from train.families.base import FamilyContext, TrainableDraft
from train.families.builders import register_trained
from train.families.settings.base import FamilySettings
from train.losses.objective import Criterion
from train.teacher.live import LiveTeacher, TeacherOutput


class BigramDraft(Draft):
    """Drafts from a table of logits [V, V]: row t is the next token's after token t."""

    name = "bigram"

    def __init__(self, table: Tensor):
        self.table = table

    def begin_batch(self, request: DraftContext) -> None:
        self.request, self.plan = request, build_tree_plan(self.shape, self.table.device)

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        def step(tokens: Tensor, length: Tensor, nodes: TreeNodes | None, above: Tensor) -> Tensor:
            return self.table[tokens]

        last = history.gather(1, length[:, None] - 1)[:, 0]
        return draft_tokens(step, self.table[last], length, k, self.plan, self.request)


def load_bigram(path: str, target: Target, device: str, dtype: str) -> BigramDraft:
    check_target(path, target)
    table = load_file(Path(path) / layouts.WEIGHTS_FILE)["table"]
    return BigramDraft(table.to(device, DTYPES[dtype]))


class BigramTrainer(nn.Module):
    """The loss of the table against the target's distributions."""

    def __init__(self, teacher: LiveTeacher, vocab: int, criterion: Criterion):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(vocab, vocab))
        self.head, self.criterion = teacher.head, criterion

    def forward(self, batch: Batch, output: TeacherOutput) -> dict[str, Tensor]:
        p_logits = self.head(output.head_inputs[batch.loss_mask])
        q_logits = self.table[batch.input_ids[batch.loss_mask]]
        target = self.criterion.target_distribution(p_logits)
        return {"loss": self.criterion.position_losses(target, q_logits).sum()}


class TrainableBigram(TrainableDraft):
    def __init__(self, context: FamilyContext, settings: FamilySettings):
        teacher = context.teacher(None)
        assert isinstance(teacher, LiveTeacher)
        vocab = context.target.runner.vocab_size
        model = BigramTrainer(teacher, vocab, context.criterion()).to(context.device)
        self.table, self.teacher, self.model = model.table, teacher, model
        self.muon_parameters, self.metadata = [], {}

    def to_draft(self) -> Draft:
        return BigramDraft(self.table.detach())

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        table = self.table.detach()
        (folder / "config.json").write_text(json.dumps({"vocab_size": len(table)}))
        save_file({"table": table}, folder / layouts.WEIGHTS_FILE, {"format": "pt"})


@dataclass
class BigramSettings(FamilySettings):
    family: Word = "bigram"

    description = "a table of bigrams"
    hub_tag = "bigram"


BIGRAM = DraftFamily("bigram", load=load_bigram)


def register() -> None:
    """Makes the family known to every command of this process."""
    register_family(BIGRAM)
    register_trained(BigramSettings, TrainableBigram)
