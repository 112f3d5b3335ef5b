"""A small LM with its loss, as a module: what runs forward, perhaps wrapped for several processes."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from decode.common.errors import UserError
from decode.drafts.base import check_tokenizer, read_metadata
from decode.drafts.causal import CausalDraft
from decode.model import attention
from decode.model.hidden_states import HiddenStateSpec, layer_stack, logit_transform
from decode.model.loading import Target, load_model, load_tokenizer, tokenizer_fingerprint
from decode.model.runner import ModelRunner
from train.data.batching import Batch
from train.families.base import FamilyContext, TrainableDraft, make_loss_fn, matrix_parameters
from train.families.config import DraftConfig
from train.losses import divergences
from train.losses.objective import Criterion
from train.teacher.live import TeacherOutput, compute_hidden_states


class CausalTrainer(nn.Module):
    """The loss of a draft LM against the target's law, at every supervised position.

    Both are projected to the vocabulary a few positions at a time, so no [N, V] of them all exists.
    """

    def __init__(self, lm: Any, head: Callable[[Tensor], Tensor], criterion: Criterion):
        super().__init__()
        self.lm, self.head, self.criterion = lm, head, criterion
        self.finish = logit_transform(lm)

    def forward(self, batch: Batch, output: TeacherOutput) -> dict[str, Tensor]:
        states = compute_hidden_states(self.lm, batch, HiddenStateSpec(final=True))[
            batch.loss_mask
        ]  # [N, H]
        projection = self.lm.get_output_embeddings()

        def sums(teacher: Tensor, states: Tensor) -> dict[str, Tensor]:
            target = self.criterion.target_distribution(self.head(teacher))
            q_logits = self.finish(projection(states))
            loss = self.criterion.position_losses(target, q_logits).sum()
            with torch.no_grad():
                overlap = divergences.acceptance.of(
                    divergences.pair_log_probs(target.log_probs, q_logits)
                )
                agree = target.log_probs[0].argmax(-1) == q_logits.argmax(-1)
            return {"loss": loss, "overlap": overlap.sum(), "top1": agree.sum().float()}

        inputs = [output.head_inputs[batch.loss_mask], states]
        return divergences.sums_in_chunks(
            sums, inputs, divergences.max_chunk_rows(projection.weight.shape[0])
        )


def build_causal(job: FamilyContext) -> TrainableDraft:
    lm = build_causal_lm(job.s.draft, job.target, job.device).train()
    lm.set_attn_implementation(attention.ATTENTION_NAME)
    settings = job.s.draft
    adapters = None
    if settings.lora_rank:
        adapters = LoraAdapters(lm, settings.lora_rank, settings.init)
    teacher = job.teacher(None)

    def save(out: Path) -> None:
        if adapters is None:
            lm.save_pretrained(out, safe_serialization=True)
        else:
            adapters.save(out)
        job.target.tokenizer.save_pretrained(out)

    return TrainableDraft(
        model=CausalTrainer(lm, teacher.head, job.criterion()),
        objective=partial(make_loss_fn, teacher),
        draft=lambda: CausalDraft(ModelRunner(lm)),
        muon_parameters=matrix_parameters(layer_stack(lm)),
        save=save,
        facts={},
        teacher=teacher,
    )


def build_causal_lm(s: DraftConfig, target: Target, device: str) -> Any:
    """A trainable causal LM in fp32 whose vocabulary is the target's."""
    if [bool(s.init), bool(s.layers), bool(s.scratch)].count(True) != 1:
        raise UserError(
            "give one of draft.init (a small LM), draft.layers (cut from the target) and draft.scratch (random weights)"
        )
    if s.layers:
        return keep_layers(target, s.layers)
    if s.scratch:
        return random_init(s.scratch, target).to(device)
    family = read_metadata(s.init).get("family", "causal")
    if family != "causal":
        raise UserError(
            f"draft.init {s.init!r} holds heads of family {family!r}: set draft.family to that, or give a small LM"
        )
    check_tokenizer(s.init, tokenizer_fingerprint(load_tokenizer(s.init)), target)
    model = load_model(s.init, "draft", device, "float32")
    resize_vocabulary(model, target.decoder.vocab_size)
    return model


def resize_vocabulary(model: Any, size: int) -> None:
    """Gives `model` as many logits as the target has, in place: engines take no draft with more or fewer.

    Models of one tokenizer are padded to different sizes. Rows that are too many are cut off: no id of the tokenizer is
    among them. New rows are the mean of all others, so the logit of each is the mean of the model's logits: it wins
    nowhere, and its probability is below 1 / V everywhere. The target's law of its own padding trains them from there.
    """
    head = model.get_output_embeddings()
    old = head.weight.shape[0]
    if old == size:
        return
    model.resize_token_embeddings(size, mean_resizing=False)
    if old > size:
        return
    head = model.get_output_embeddings()
    tables = {id(w): w for w in (model.get_input_embeddings().weight, head.weight)}
    with torch.no_grad():
        for weight in [*tables.values(), *([] if head.bias is None else [head.bias])]:
            weight[old:] = weight[:old].mean(0)


def random_init_config(changes: dict[str, Any], config: Any, vocab: int) -> Any:
    """The target's text `config` with `changes` and `vocab` tokens. UserError names a field that it has not."""
    fields = config.to_dict()
    unknown = sorted(set(changes) - set(fields))
    if unknown or "vocab_size" in changes:
        name = unknown[0] if unknown else "vocab_size"
        reason = (
            "is the target's"
            if name == "vocab_size"
            else f"is no field of {config.model_type}'s config"
        )
        raise UserError(f"draft.scratch: {name} {reason}: leave it out")
    if changes.get("num_hidden_layers", config.num_hidden_layers) != config.num_hidden_layers:
        fields.pop("layer_types", None)  # as the class lays them out for another depth
    if "hidden_size" in changes or "num_attention_heads" in changes:
        fields.pop("head_dim", None)
    return type(config).from_dict({**fields, **changes, "vocab_size": vocab})


def random_init(changes: dict[str, Any], target: Target) -> Any:
    """A model of the target's kind with random weights; UserError if there can be none with these `changes`."""
    try:
        config = random_init_config(changes, target.decoder.config, target.decoder.vocab_size)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except UserError:
        raise
    except (
        Exception
    ) as error:  # any of a dozen kinds, from a size that does not divide to a missing field
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"draft.scratch {changes} makes no model: {reason}") from error


class LoraAdapters:
    """LoRA adapters in all linear layers of a causal LM, in place; all its other weights are frozen."""

    def __init__(self, model: Any, rank: int, base: str):
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
        self.base = base
        self.peft: Any = get_peft_model(model, config)

    def save(self, out: Path) -> None:
        """The merged model in `out`, and if its base lies somewhere the adapters for that in `out`/adapter."""
        if self.base:
            self.peft.peft_config["default"].base_model_name_or_path = self.base
            self.peft.save_pretrained(out / "adapter", save_embedding_layers=False)
        merged = copy.deepcopy(self.peft).merge_and_unload()
        merged.save_pretrained(out, safe_serialization=True)


def keep_layers(target: Target, layers: list[int]) -> Any:
    """A copy of the target that keeps only `layers`, renumbered so that its cache is as short."""
    depth = target.decoder.config.num_hidden_layers
    if not all(0 <= i < depth for i in layers) or sorted(set(layers)) != layers:
        raise UserError(f"draft.layers {layers}: name layers of 0 … {depth - 1} in rising order")
    model = copy.deepcopy(target.decoder.model).float()
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if len(stacks) != 1:
        raise UserError(f"{target.name}: cannot tell which modules are its {depth} layers")
    for name, module in model.named_modules():
        for child, stack in module.named_children():
            if stack is stacks[0]:
                kept = nn.ModuleList(stacks[0][i] for i in layers)
                for number, layer in enumerate(kept):
                    for part in layer.modules():
                        if "layer_idx" in vars(part):
                            part.layer_idx = number  # type: ignore[assignment]
                setattr(model.get_submodule(name), child, kept)
    config = model.config.get_text_config(decoder=True)
    config.num_hidden_layers = len(layers)
    if config.to_dict().get("layer_types"):
        config.layer_types = [config.layer_types[i] for i in layers]
    return model
