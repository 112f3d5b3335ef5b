"""Multi-token prediction (MTP) layers in training: the target's own, fine-tuned, or a new one for any target.

DeepSeek-AI, arXiv 2412.19437, section 2.2. One layer is run `steps` times, from the second time on its own states, as
in decoding. It learns the target's distribution, not the next word of the data.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from decode.checkpoints import layouts
from decode.drafts import mtp
from decode.drafts.mtp import MtpDraft, MtpModel
from decode.model import attention
from decode.model.hidden_states import LMHead
from decode.model.loading import Target
from decode.model.masks import SlotMask
from train.data.batching import Batch
from train.families.alignment import Alignment
from train.families.base import (
    FamilyContext,
    TrainableDraft,
    TrainableHead,
    check_widths,
    load_saved_config,
    model_dtype,
)
from train.families.eagle import EagleTrainer
from train.families.head_loss import SupervisedRows
from train.families.settings.heads import MtpSettings


def build_mtp(context: FamilyContext, s: MtpSettings) -> TrainableDraft:
    net = init_mtp(s, context.target, context.device)
    # config.json is the target's, without its folder's path.
    fields = context.target.runner.config.to_dict()
    config = {key: value for key, value in fields.items() if not key.startswith("_")}
    config["num_nextn_predict_layers"] = 1
    return TrainableMtp(context, s, net, config, MtpTrainer, MtpDraft)


class MtpTrainer(EagleTrainer):
    """The loss of an MTP layer that runs `steps` times over each slot."""

    net: MtpModel  # type: ignore[assignment]

    def step_states(
        self, batch: Batch, features: Tensor, places: Alignment, rows: SupervisedRows
    ) -> Tensor:
        """[N, J, h]: the states of the supervised `rows` after each step; each step is a pass over all tokens."""
        cache = DynamicCache()
        state = features.to(self.net.fc.weight.dtype)
        slots = torch.arange(state.shape[1], device=state.device).expand(len(state), -1)
        states = []
        for j in range(self.steps):
            at = places.step(j)
            embeds = self.net.embed(at.token, self.embedding).to(state.dtype)
            # the keys of step 0 up to a slot, and of each later step the slot's own
            with attention.masked_by(SlotMask(slots, slots.shape[1], batch.documents, j)):
                state = self.net(state, embeds, at.position, cache)
            states.append(rows.values_at_slots(state, j))
        return torch.stack(states, 1)


class TrainableMtp(TrainableHead):
    """An MTP layer in training, saved in the layout of its target's files."""

    def save(self, folder: Path) -> None:
        dtype = model_dtype(self.target)
        name = str(dtype).removeprefix("torch.")
        tensors = {key: value.detach().cpu() for key, value in self.net.state_dict().items()}
        cast = {key: tensors[key].to(dtype) for key, _ in self.net.named_parameters()}
        number = self.target.runner.config.num_hidden_layers
        config = {**self.config, "dtype": name, "torch_dtype": name}
        layouts.write_checkpoint(folder, config, mtp.to_files(tensors | cast, number))


def init_mtp(s: MtpSettings, target: Target, device: str) -> MtpModel:
    """The layer of the draft or target in draft.init, else a new one that begins as the target's last.

    A new one begins with the state alone: the weights for the token's embedding are small.
    """
    check_widths(target)
    if s.init:
        load_saved_config(s.init, s.family)
        return mtp.load_net(s.init, target, device, "float32")
    model = target.runner.model
    net = MtpModel(mtp.last_layer(model), LMHead(model))
    width = net.fc.out_features
    with torch.no_grad():
        nn.init.normal_(net.fc.weight, std=0.1 * width**-0.5)
        net.fc.weight[:, width:] += torch.eye(width)
    return net.to(device)
