"""A small language model as draft: its weights, its loss against the target's distribution, and its sizes."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decode.checkpoints import draft_vocab
from decode.checkpoints.draft_folder import check_vocabulary, read_metadata
from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.drafts.causal import causal_draft, load_ids
from decode.model import attention
from decode.model.compatibility import check_sizes
from decode.model.cut_layers import check_config, cut_layers
from decode.model.hidden_states import HiddenStateSpec, LogitTransform
from decode.model.layer_stack import decoder_config, layer_stack, renumber_layers, with_layers
from decode.model.loading import (
    Target,
    auto_class,
    build_runner,
    load_model,
)
from decode.model.runner import ModelRunner
from train.data import vocab_mapping
from train.data.batching import Batch
from train.families.base import FamilyContext, TrainableDraft, matrix_parameters
from train.families.settings.base import vocab_size
from train.families.settings.causal import CausalSettings
from train.losses import chunked_sums, divergences
from train.losses.objective import Criterion
from train.teacher.live import TeacherOutput, compute_hidden_states


class TrainableCausal(TrainableDraft):
    """A language model in training, perhaps by LoRA adapters alone, and perhaps of some of the target's tokens only.

    With such a reduced vocabulary q is that over these tokens wherever the draft speaks: in the loss, in decoding, and
    in the text that it writes for on-policy training. The saved model is whole, with the ids beside it.
    """

    def __init__(self, context: FamilyContext, s: CausalSettings):
        self.settings, target = s, context.target
        self.lm = build_causal_lm(s, target, context.device, context.init_shape).train()
        check_same_kind(self.lm, target)
        if not self.lm.config.is_encoder_decoder:
            self.lm.set_attn_implementation(attention.ATTENTION_NAME)
        if s.activation_checkpointing:
            attention.recompute_layers(self.lm)
        self.adapters: LoraAdapters | None = None
        if s.lora_rank:
            base = "" if s.layers else s.init  # a model that was cut lies nowhere
            self.adapters = LoraAdapters(self.lm, s.lora_rank, base)
        self.tokenizer = target.tokenizer
        self.teacher = context.teacher(None)
        ids, self.metadata = init_vocabulary(context, s)
        self.ids = ids
        self.model = self.make_trainer(context, self.teacher.head, ids)
        self.muon_parameters = matrix_parameters(layer_stack(self.lm))

    def make_trainer(
        self, context: FamilyContext, head: Callable[[Tensor], Tensor], ids: Tensor | None
    ) -> nn.Module:
        """The module that computes the loss; `head` gives the target's logits of the teacher's rows."""
        return CausalTrainer(self.lm, head, context.criterion(), ids)

    def to_draft(self) -> Draft:
        return causal_draft(self.language_model())

    def language_model(self) -> ModelRunner:
        return build_runner(self.lm, ids=self.ids)

    def save(self, folder: Path) -> None:
        if self.adapters is None:
            self.lm.save_pretrained(folder, safe_serialization=True)
        else:
            self.adapters.save(folder)
        draft_vocab.save_ids(folder, self.ids)
        self.tokenizer.save_pretrained(folder)


class CausalTrainer(nn.Module):
    """The loss of a draft LM against the target's distribution at every supervised position, as a module.

    Both are projected to the vocabulary a few positions at a time, so that no [N, V] of all N positions exists. With
    `ids` [Vd] the draft is projected to these tokens alone, and q has no mass elsewhere.
    """

    def __init__(
        self,
        lm: Any,
        head: Callable[[Tensor], Tensor],
        criterion: Criterion,
        ids: Tensor | None = None,
    ):
        super().__init__()
        self.lm, self.head, self.criterion = lm, head, criterion
        self.finish = LogitTransform(lm)
        self.ids: Tensor | None
        self.register_buffer("ids", ids, persistent=False)

    def forward(self, batch: Batch, output: TeacherOutput) -> dict[str, Tensor]:
        states = compute_hidden_states(self.lm, batch, HiddenStateSpec(final=True))[
            batch.loss_mask
        ]  # [N, H]
        ids = self.ids
        size = chunked_sums.max_chunk_rows(self.lm.get_output_embeddings().weight.shape[0])
        project, selected = output_projection(self.lm, ids)

        def sums(teacher: Tensor, states: Tensor, *selected: Tensor) -> dict[str, Tensor]:
            p_logits = self.head(teacher)
            likeliest = p_logits.argmax(-1)
            target = self.criterion.target_distribution(p_logits, ids)
            del p_logits  # as wide as the vocabulary
            q_logits = self.finish(project(states, *selected))
            loss = self.criterion.position_losses(target, q_logits).sum()
            with torch.no_grad():
                overlap = divergences.acceptance.of(
                    divergences.pair_log_probs(target.log_probs, q_logits)
                )
                agree = divergences.drafted(q_logits, ids) == likeliest
            return {"loss": loss, "overlap": overlap.sum(), "top1": agree.sum().float()}

        inputs = [output.head_inputs[batch.loss_mask], states]
        return chunked_sums.sums_in_chunks(sums, inputs, size, selected)


def output_projection(lm: Any, ids: Tensor | None) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """(function, selected): function(states [N, H], *selected) is the LM head's output for the tokens `ids` [Vd]; None:
    for all, and nothing is selected.

    The rows are selected once, here: selecting them in each chunk of a batch would give each a gradient of all rows.
    """
    head: Any = lm.get_output_embeddings()
    if ids is None:
        return head, []
    return F.linear, [x.index_select(0, ids) for x in (head.weight, head.bias) if x is not None]


def init_vocabulary(
    context: FamilyContext, s: CausalSettings
) -> tuple[Tensor | None, dict[str, Any]]:
    """(ids [Vd] of the tokens that the draft learns to draft, or None for all; what draftsmith.json records of them).

    The ids are those of the draft in draft.init if it has a reduced vocabulary, else the draft.vocab most frequent
    tokens, always with those that end a text.
    """
    target, vocab = context.target, context.target.runner.vocab_size
    ids = None
    if context.init_shape is not None:  # of a draft on the Hub the whole vocabulary is counted
        ids = draft_vocab.read_ids(s.init, vocab, False)
    elif s.init:
        ids = load_ids(s.init, vocab)
    if ids is not None:
        if s.vocab not in (None, len(ids)):
            raise UserError(
                f"draft.vocab is {s.vocab}, and the draft in draft.init, {s.init!r}, has {len(ids)}: leave it out or "
                "start anew without draft.init"
            )
    elif vocab_size(s.vocab, vocab) == vocab:
        return None, {}
    counts = vocab_mapping.count_tokens(context.rows, vocab)
    if ids is None:
        ids = vocab_mapping.build(counts, vocab_size(s.vocab, vocab), sorted(target.eos))
    assert ids is not None  # as it is smaller than the vocabulary
    facts = {"vocabulary": vocab_mapping.describe(ids, counts)}
    return ids.to(context.device), facts


def build_causal_lm(s: CausalSettings, target: Target, device: str, shape: Any = None) -> Any:
    """A trainable causal LM in fp32 whose vocabulary is the target's. With `shape`, the config of draft.init, no
    weight is read."""
    cut = bool(s.layers) and not s.init
    if [bool(s.init), bool(s.init_config), cut].count(True) != 1:
        raise UserError(
            "give one of draft.init (a small LM), draft.layers (cut from the target, or with draft.init from that) and "
            "draft.init_config (random weights)"
        )
    if s.init_config:
        return random_init(s.init_config, target).to(device)
    model = load_init(s, target, device, shape) if s.init else target.runner.model
    check_layers(model, s)
    if not s.init:
        return copy_layers(model, s.layers)
    if s.layers:
        cut_layers(model, s.layers)
    return model


def load_init(s: CausalSettings, target: Target, device: str, shape: Any = None) -> Any:
    """The small LM in draft.init, in fp32, with the target's vocabulary."""
    family = read_metadata(s.init).family or "causal"
    if family not in ("causal", s.family):
        raise UserError(
            f"draft.init {s.init!r} holds heads of family {family!r}: set draft.family to that, or give a small LM"
        )
    if shape is not None:
        model = auto_class(shape).from_config(shape, dtype=torch.float32)
    else:
        check_vocabulary(s.init, target)
        model = load_model(s.init, "draft", device, "float32")
    draft_vocab.resize_vocabulary(model, target.runner.vocab_size)
    return model


def check_same_kind(model: Any, target: Target) -> None:
    """UserError unless draft and target are both causal LMs or both encoder-decoders: they read the same batches."""
    kinds = {False: "a causal LM", True: "an encoder-decoder"}
    own, wanted = (m.config.is_encoder_decoder for m in (model, target.runner.model))
    if own != wanted:
        raise UserError(
            f"the draft is {kinds[own]} and the target {kinds[wanted]}: give a draft.init of the target's kind"
        )


def random_init_config(changes: dict[str, Any], config: Any, vocab: int) -> Any:
    """The target's text `config` with `changes` and `vocab` tokens. UserError names a field that it lacks."""
    fields = config.to_dict()
    unknown = sorted(set(changes) - set(fields))
    if unknown or "vocab_size" in changes:
        name = unknown[0] if unknown else "vocab_size"
        reason = (
            "is the target's"
            if name == "vocab_size"
            else f"is no field of {config.model_type}'s config"
        )
        raise UserError(f"draft.init_config: {name} {reason}: leave it out")
    if changes.get("num_hidden_layers", config.num_hidden_layers) != config.num_hidden_layers:
        fields.pop("layer_types", None)  # the config class derives it anew for another depth
    if "hidden_size" in changes or "num_attention_heads" in changes:
        fields.pop("head_dim", None)
    made = type(config).from_dict({**fields, **changes, "vocab_size": vocab})
    check_sizes(made, "draft.init_config")
    return made


def random_init(changes: dict[str, Any], target: Target) -> Any:
    """A model of the target's kind with random weights; UserError if there can be none with these `changes`."""
    try:
        own = target.runner.model.config
        whole = own if own.is_encoder_decoder else target.runner.config
        config = random_init_config(changes, whole, target.runner.vocab_size)
        return auto_class(config).from_config(config, dtype=torch.float32)
    except UserError:
        raise
    except Exception as error:  # a dozen kinds, from a size that does not divide to a missing field
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"draft.init_config {changes} makes no model: {reason}") from error


class LoraAdapters:
    """LoRA adapters in all linear layers of a causal LM, in place; all its other weights are frozen."""

    def __init__(self, model: Any, rank: int, base: str):
        from peft import LoraConfig, get_peft_model  # takes half a second

        config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
        self.base = base
        self.peft: Any = get_peft_model(model, config)

    def save(self, out: Path) -> None:
        """Writes the merged model to `out`; if the base model has a path, also the adapters to `out`/adapter."""
        if self.base:
            self.peft.peft_config["default"].base_model_name_or_path = self.base
            self.peft.save_pretrained(out / "adapter", save_embedding_layers=False)
        merged = copy.deepcopy(self.peft).merge_and_unload()
        merged.save_pretrained(out, safe_serialization=True)


def check_layers(model: Any, s: CausalSettings) -> None:
    """UserError for draft.layers that `model` does not have."""
    depth, whole = decoder_config(model).num_hidden_layers, model.config.is_encoder_decoder
    layers = s.layers
    if not all(0 <= i < depth for i in layers) or sorted(set(layers)) != layers:
        raise UserError(f"draft.layers {layers}: name layers of 0 … {depth - 1} in rising order")
    if whole and layers and 0 not in layers:
        raise UserError(f"draft.layers {layers}: keep layer 0, which has the position bias of all")


def copy_layers(model: Any, layers: Sequence[int]) -> Any:
    """A copy of the target's `model` in fp32 with only `layers`, or all of them if none is named.

    Of an encoder-decoder these are layers of the decoder; the encoder stays whole.
    """
    layers = layers or range(decoder_config(model).num_hidden_layers)
    copied = copy.deepcopy(with_layers(model, layers)).float()
    renumber_layers(copied, layers)
    check_config(copied)
    return copied
