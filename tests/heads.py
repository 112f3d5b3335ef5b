"""Draft heads over tiny targets: random ones, and ones that know a text by heart, solved for and not trained."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from decode.checkpoints import eagle_layouts, head_layouts, layouts
from decode.checkpoints.draft_folder import METADATA_FILE
from decode.drafts.eagle import EagleDraft
from decode.drafts.eagle_model import Eagle1Model, Eagle3Model, EagleModel, llama_config
from decode.drafts.medusa import MedusaDraft, MedusaModel
from decode.model.hidden_states import HiddenStateSpec, LMHead
from decode.model.loading import Target
from decode.verification.tree import TreeShape
from tests.tiny import reference

Net = EagleModel | MedusaModel
FAMILIES = ["medusa", "eagle1", "eagle3", "narrow"]
"""`eagle3` has a reduced vocabulary; `narrow` is an EAGLE-3 half as wide as its target, with the whole one."""
HEADS = 3


def ids_of(family: str, vocab: int) -> torch.Tensor | None:
    """The ids that a draft of this family can say: not all, so that its own numbers differ from the target's."""
    ids = torch.arange(vocab)
    return ids[ids % 7 != 1] if family == "eagle3" else None


def fields(family: str, target: Target, **changes: Any) -> dict[str, Any]:
    """config.json of untrained heads for this target."""
    config, vocab = target.runner.config, target.runner.vocab_size
    if family == "medusa":
        return head_layouts.medusa_config(config, HEADS, 1, vocab) | changes
    if family == "eagle1":
        return eagle_layouts.eagle1_config(config, vocab) | changes
    ids = ids_of(family, vocab)
    size = vocab if ids is None else len(ids)
    layers = tuple(range(min(3, config.num_hidden_layers)))
    width = config.hidden_size // 2 if family == "narrow" else 0
    return eagle_layouts.eagle3_config(config, vocab, size, layers, width) | changes


def net_of(family: str, target: Target, seed: int = 0, **changes: Any) -> Net:
    """Random heads, in the dtype of the target; `changes` go into config.json."""
    config, model = fields(family, target, **changes), target.runner.model
    net: Net
    if family == "medusa":
        net = MedusaModel(config)
    elif family == "eagle1":
        net = Eagle1Model(llama_config(config), LMHead(model))
    else:
        layers = eagle_layouts.aux_layers(config, target.runner.config.num_hidden_layers)
        ids = ids_of(family, config["vocab_size"])
        net = Eagle3Model(llama_config(config), HiddenStateSpec(layers), ids)
    return randomise(net, seed).to(model.dtype)


def randomise(net: Net, seed: int) -> Net:
    """Every parameter away from where it starts, norms and biases too, so that none can be left out unseen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in net.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if value.ndim == 2:
                value.copy_(noise * value.shape[1] ** -0.5)
            elif "norm" in name:
                value.copy_(1 + 0.3 * noise)
            elif name != "fc.bias":  # EAGLE-1's stays zero
                value.copy_(0.3 * noise)
    return net


def draft_of(net: Net, target: Target, shape: TreeShape = None) -> EagleDraft | MedusaDraft:
    """The draft around a net."""
    draft: EagleDraft | MedusaDraft
    if isinstance(net, MedusaModel):
        draft = MedusaDraft(net, target)
    else:
        draft = EagleDraft(net, target, "eagle1" if isinstance(net, Eagle1Model) else "eagle3")
    draft.shape = shape
    return draft


def random_draft(
    family: str, target: Target, shape: TreeShape = None, seed: int = 0, **changes: Any
) -> EagleDraft | MedusaDraft:
    """Heads that know nothing: almost all that they propose is rejected."""
    return draft_of(net_of(family, target, seed, **changes), target, shape)


def save(
    folder: Path, family: str, net: Net, target: Target, dtype: torch.dtype, **changes: Any
) -> str:
    """The draft directory of a net, as training leaves it."""
    layouts.save_heads(
        folder, fields(family, target, **changes), net, dtype,
        None if isinstance(net, MedusaModel) else net.ids,
    )  # fmt: skip
    name = "eagle3" if family == "narrow" else family
    facts = {"family": name, "tokenizer_hash": target.fingerprint}
    (folder / METADATA_FILE).write_text(json.dumps(facts))
    return str(folder)


# ---- heads that know a text by heart ----

Text = tuple[list[int], list[int]]
"""A prompt and what the target says to it."""
INNER = 192
"""Width of an MLP that can hold as many slots as the texts of these tests have."""
SURE = 12.0
"""Logit of a token that a head knows: trees that grow by confidence shall follow it."""


def sure(model: Any) -> Any:
    """The same model with clearer preferences: EAGLE-1 shares its head, and trees by confidence need some."""
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    return model


def prefilled(target: Target, ids: Sequence[int], taps: HiddenStateSpec) -> torch.Tensor:
    """[len(ids), F]: the tapped states of a text."""
    target.runner.capture_hidden_states(taps)
    target.runner.allocate(1, len(ids))
    target.runner.prefill(torch.tensor([list(ids)]), torch.tensor([len(ids)]))
    target.runner.capture_hidden_states(None)
    return target.runner.features[0]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention over a whole text at once, as a net calls it."""
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


@torch.no_grad()
def knowing_net(
    family: str, target: Target, texts: Sequence[Text], forget: float = 0.0, noise: float = 0.0,
    seed: int = 0,
) -> Net:  # fmt: skip
    """Heads that predict these texts from the target's states; a share `forget` of the slots they do not know.

    With `noise` in what was solved for, a token may be right and the state behind it not.

    The layers in front stay random, so that the answer hangs on every state, token and position before it; only the
    last matrix is solved for. Behind a slot that is known an EAGLE net gives just the state that it would read from
    the target one slot later, so it goes on as well from its own states as from true ones."""
    inner = {} if family == "medusa" else {"intermediate_size": INNER}
    net = net_of(family, target, seed, **inner)
    generator = torch.Generator().manual_seed(seed + 1)
    spans, features = [], []
    for prompt, answer in texts:
        states = prefilled(target, [*prompt, *answer], net.aux_layers)
        # The first round starts at the prompt's last token; the last state whose next two tokens are known ends it.
        spans.append((len(prompt) - 1, len(prompt) + len(answer) - 2))
        features.append(states)
    ids = [torch.tensor([*prompt, *answer]) for prompt, answer in texts]
    if isinstance(net, MedusaModel):
        for j, head in enumerate(net.lm_heads):
            states = [
                net.states(f[a : b - j], j) for f, (a, b) in zip(features, spans, strict=True)
            ]
            labels = [x[a + 2 + j : b + 2] for x, (a, b) in zip(ids, spans, strict=True)]
            known, right = torch.cat(states), SURE * F.one_hot(torch.cat(labels), len(head.weight))
            part = known_slots(len(known), max(forget, j / 4 * forget), generator)
            head.weight.copy_(solve(known[part], right[part].to(known.dtype)))
        return net
    if isinstance(
        net, Eagle3Model
    ):  # true states become the codes of the token that they are paired with
        width = net.config.hidden_size
        codes = F.normalize(
            torch.randn(target.runner.vocab_size, width, generator=generator), dim=1
        )
        codes = codes.to(net.fc.weight.dtype)
        net.norm.weight.fill_(1)
        net.lm_head.weight.copy_(SURE / 4 * (codes if net.ids is None else codes[net.ids]))
        pairs = [
            (f[a : b + 1], codes[x[a + 1 : b + 2]])
            for f, x, (a, b) in zip(features, ids, spans, strict=True)
        ]
        net.fc.weight.copy_(solve(*map(torch.cat, zip(*pairs, strict=True))))
    layer, embedding = net.layers[0], target.runner.model.get_input_embeddings().weight
    seen: dict[str, torch.Tensor] = {}
    layer.mlp.down_proj.register_forward_pre_hook(lambda m, args: seen.update(inner=args[0][0]))
    layer.post_attention_layernorm.register_forward_pre_hook(
        lambda m, args: seen.update(bare=args[0][0])
    )
    inners, rests = [], []
    for f, x, (a, b) in zip(features, ids, spans, strict=True):
        states = net.init_state(f)
        net.step(
            states[None, :-1], net.embed(x[None, 1:], embedding), torch.arange(len(x) - 1)[None],
            causal,
        )  # fmt: skip
        inners.append(seen["inner"][a:b])
        rests.append(states[a + 1 : b + 1] - seen["bare"][a:b])
    for module in (layer.mlp.down_proj, layer.post_attention_layernorm):
        module._forward_pre_hooks.clear()
    known, rest = torch.cat(inners), torch.cat(rests)
    part = known_slots(len(known), forget, generator)
    weight = solve(known[part], rest[part])
    weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    layer.mlp.down_proj.weight.copy_(weight)
    return net


def knowing_draft(
    family: str, target: Target, texts: Sequence[Text], shape: TreeShape = None,
    forget: float = 0.0, seed: int = 0,
) -> EagleDraft | MedusaDraft:  # fmt: skip
    """The draft around a `knowing_net`."""
    return draft_of(knowing_net(family, target, texts, forget, seed), target, shape)


def known_slots(count: int, forget: float, generator: torch.Generator) -> torch.Tensor:
    """[count] bool, a share `forget` of them False."""
    return torch.rand(count, generator=generator) >= forget


def solve(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The smallest W with x W' = y, [out, in] as a Linear has it."""
    return torch.linalg.lstsq(x.double(), y.double(), driver="gelsd").solution.T.to(x.dtype)


def hf_states(model: Any, ids: Sequence[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """hidden_states ([len, H] each) and logits [len, V] of transformers' own forward: no hook, no store of ours."""
    with torch.no_grad():
        out = reference(model)(
            torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False
        )
    return [states[0] for states in out.hidden_states], out.logits[0]
