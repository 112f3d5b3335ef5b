"""Packs a tiny Llama by the packages that define the formats, and writes down what their own unpacking gives.

    V/bin/pip install torch transformers compressed-tensors==0.20.1
    V/bin/python tests/golden/packed/packers.py compressed_tensors

The others, each in an environment of its own: `act_order` with compressed-tensors==0.11.0, the last minor version but
few that has act-order and 2:4 sparsity; `gptq` with auto-gptq==0.7.1; `awq` with autoawq==0.2.9; `modelopt` with
nvidia-modelopt==0.47.0. All run on a CPU.

Each NAME.safetensors is the packed model as the package saves it. Its metadata holds the package's version, the whole
config.json, and the start of the SHA-256 of each weight that the package unpacks, in the dtype that it unpacks to.
tests/decode/model/test_packers.py reads them.
"""

import hashlib
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
FLOAT = {"type": "float", "num_bits": 8}
TOKEN = {"strategy": "token", "dynamic": True}
GROUP = {"num_bits": 4, "strategy": "group", "group_size": 8}
CASES = {
    # name: (dtype, weights, activations)
    "int4-groups": (torch.float32, GROUP, None),
    "int4-groups-asymmetric": (torch.bfloat16, GROUP | {"symmetric": False}, None),
    "int4-channels-asymmetric": (
        torch.float32,
        {"num_bits": 4, "strategy": "channel", "symmetric": False},
        None,
    ),
    "int4-tensor-asymmetric": (
        torch.bfloat16,
        {"num_bits": 4, "strategy": "tensor", "symmetric": False},
        None,
    ),
    "int8-packed": (torch.bfloat16, {"strategy": "channel"}, None),
    "w8a8-channels": (torch.bfloat16, {"strategy": "channel"}, TOKEN),
    "w8a8-channels-asymmetric": (
        torch.float32,
        {"strategy": "channel", "symmetric": False},
        TOKEN,
    ),
    "fp8-channels": (torch.float32, FLOAT | {"strategy": "channel"}, FLOAT | TOKEN),
    "fp8-blocks": (
        torch.bfloat16,
        FLOAT | {"strategy": "block", "block_structure": [10, 12]},
        FLOAT | TOKEN,
    ),
    "fp8-naive": (torch.bfloat16, FLOAT | {"strategy": "channel"}, None),
    "int3-groups": (torch.bfloat16, GROUP | {"num_bits": 3}, None),
    "nvfp4": (
        torch.bfloat16,
        {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
        None,
    ),
}  # fmt: skip


def tiny_llama(dtype: torch.dtype, inner: int = 32, hidden: int = 16) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        vocab_size=8, dtype=dtype, tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape).to(dtype)
    return model


def set_scales(module, args) -> None:
    """Scales and zero points from the least and largest number that share one, as the package computes them."""
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = module.weight.detach().float()
    rows, columns = weight.shape
    if args.strategy == "tensor":
        low, high = weight.min().reshape(1), weight.max().reshape(1)
    else:
        high_rows, wide = {
            "channel": (1, columns),
            "group": (1, args.group_size),
            "tensor_group": (1, args.group_size),
            "block": args.block_structure,
        }[args.strategy]
        blocks = [
            [
                weight[at : at + high_rows, to : to + wide].aminmax()
                for to in range(0, columns, wide)
            ]
            for at in range(0, rows, high_rows)
        ]
        low = torch.tensor([[float(b.min) for b in row] for row in blocks])
        high = torch.tensor([[float(b.max) for b in row] for row in blocks])
    if args.strategy == "tensor_group":
        module.weight_global_scale.data.fill_(448 * 6 / weight.abs().max())
    known = getattr(module, "weight_global_scale", None)
    scale, zero = calculate_qparams(low, high, args, global_scale=known)
    module.weight_scale.data = scale.to(module.weight_scale.dtype)
    module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)
    if hasattr(module, "input_scale"):
        module.input_scale.data.fill_(0.5)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def save(name: str, package: str, folder: str, weights: dict[str, torch.Tensor]) -> None:
    """Keeps a packed folder as one file, with the weights that it stands for."""
    config = json.loads((Path(folder) / "config.json").read_text())
    tensors = {k: v for f in Path(folder).glob("*.safetensors") for k, v in load_file(f).items()}
    dtypes = {str(value.dtype).removeprefix("torch.") for value in weights.values()}
    (dtype,) = dtypes
    metadata = {
        "format": "pt",
        "packer": f"{package} {importlib.metadata.version(package)}",
        "config": json.dumps(config),
        "dtype": dtype,
        "weights": json.dumps({n: digest(w) for n, w in weights.items()}),
    }
    save_file(tensors, HERE / f"{name}.safetensors", metadata=metadata)


def linear_layers(model) -> dict[str, torch.nn.Module]:
    return {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}


def compressed_tensors(cases=CASES) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    for name, (dtype, weights, inputs) in cases.items():
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        stated = {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
        # with 24 inputs three bits take as many words as four
        model = tiny_llama(dtype, 24 if weights.get("num_bits") == 3 else 32)
        config = QuantizationConfig(**stated, quant_method="compressed-tensors")
        apply_quantization_config(model, config)
        layers = linear_layers(model)
        for module in layers.values():
            set_scales(module, module.quantization_scheme.weights)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            compressor.update_config(folder)
            if name != "nvfp4":
                compressor.decompress_model(model)
            plain = {f"{n}.weight": m.weight.data for n, m in layers.items() if name != "nvfp4"}
            norms = {"model.norm.weight": model.model.norm.weight.data}
            save(name, "compressed-tensors", folder, plain | norms)


def act_order() -> None:
    """Written by hand from the package's parts: its ways of doing it are those of another version of transformers."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    model = tiny_llama(torch.bfloat16)
    args = QuantizationArgs(**GROUP, actorder="group")
    group = {"targets": ["Linear"], "weights": args.model_dump(), "input_activations": None}
    tensors, plain = {}, {}
    packer = BaseCompressor.load_from_registry("pack-quantized")
    for number, (name, module) in enumerate(linear_layers(model).items()):
        weight = module.weight.data
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(number))
        g_idx = (order // args.group_size).int()
        parts = [weight[:, g_idx == g].float().aminmax(dim=1) for g in range(int(g_idx.max()) + 1)]
        low, high = torch.stack([p.min for p in parts], 1), torch.stack([p.max for p in parts], 1)
        scale, zero = calculate_qparams(low, high, args)
        scale = scale.bfloat16()
        packed = packer.compress_weight(
            weight=weight, scale=scale, zero_point=zero, g_idx=g_idx, quantization_args=args
        )
        parts = packed | {"weight_scale": scale, "weight_g_idx": g_idx}
        tensors |= {f"{name}.{part}": value.contiguous() for part, value in parts.items()}
        plain[f"{name}.weight"] = packer.decompress_weight(parts, quantization_args=args)
    keep(model, "int4-act-order", "compressed-tensors", tensors, plain, {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group},
    })  # fmt: skip


def keep(model, name: str, package: str, tensors: dict, plain: dict, q: dict) -> None:
    """`save` of layers that were packed one by one."""
    layers = linear_layers(model)
    others = {
        n: v for n, v in model.state_dict().items() if n.rpartition(".")[0] not in layers and n != "lm_head.weight"
    }
    config = json.loads(model.config.to_json_string()) | {"quantization_config": q}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        save_file(tensors | others, Path(folder) / "model.safetensors")
        save(name, package, folder, plain)


def gptq() -> None:
    import types

    place = Path(importlib.metadata.distribution("auto-gptq").locate_file("auto_gptq"))
    for part in ("", ".nn_modules"):  # without what it imports of older versions of transformers
        stub = types.ModuleType(f"auto_gptq{part}")
        stub.__path__ = [str(place.joinpath(*part.split(".")[1:]))]
        sys.modules[f"auto_gptq{part}"] = stub
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    for name, bits, act_order in (("gptq4-act-order", 4, True), ("gptq2", 2, False)):
        model = tiny_llama(torch.float16, hidden=32)
        tensors, plain = {}, {}
        for number, (layer, module) in enumerate(linear_layers(model).items()):
            outputs, inputs = module.weight.shape
            rng = torch.Generator().manual_seed(number)
            g_idx = (torch.arange(inputs) // 16).int()
            if act_order:
                g_idx = g_idx[torch.randperm(inputs, generator=rng)]
            scales = (0.3 + torch.rand(outputs, inputs // 16, generator=rng)).half()
            zeros = torch.randint(1, 2**bits, (outputs, inputs // 16), generator=rng).half()
            own = QuantLinear(bits, 16, inputs, outputs, bias=False)
            numbers = torch.randint(0, 2**bits, (outputs, inputs), generator=rng)
            module.weight.data = (numbers - zeros.float()[:, g_idx]).half() * scales[:, g_idx]
            module.float()
            own.pack(module, scales.float(), zeros.float(), g_idx)
            tensors |= {
                f"{layer}.qweight": own.qweight, f"{layer}.qzeros": own.qzeros,
                f"{layer}.scales": own.scales.half(), f"{layer}.g_idx": own.g_idx,
            }  # fmt: skip
            own.scales = own.scales.float()
            plain[f"{layer}.weight"] = own(torch.eye(inputs)).T
        keep(model, name, "auto-gptq", tensors, plain, {
            "quant_method": "gptq", "bits": bits, "group_size": 16, "desc_act": act_order, "sym": False,
        })  # fmt: skip


def awq() -> None:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    model = tiny_llama(torch.float16, hidden=32)
    tensors, plain = {}, {}
    for layer, module in linear_layers(model).items():
        low, high = module.weight.data.float().unflatten(1, (-1, 16)).aminmax(dim=-1)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales).round().clamp(0, 15)
        module.weight.data = (
            ((module.weight / scales.repeat_interleave(16, 1)).round() + zeros.repeat_interleave(16, 1))
            .clamp(0, 15).sub(zeros.repeat_interleave(16, 1)).mul(scales.repeat_interleave(16, 1)).half()
        )  # fmt: skip
        own = WQLinear_GEMM.from_linear(
            module, 4, 16, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
        )
        parts = {"qweight": own.qweight, "qzeros": own.qzeros, "scales": own.scales}
        tensors |= {f"{layer}.{part}": value for part, value in parts.items()}
        plain[f"{layer}.weight"] = dequantize_gemm(own.qweight, own.qzeros, own.scales, 4, 16).T
    keep(model, "awq", "autoawq", tensors, plain, {
        "quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm",
    })  # fmt: skip


def modelopt() -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor

    forms = {
        "modelopt-fp8": mtq.FP8_DEFAULT_CFG,
        "modelopt-fp8-rows": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
        "modelopt-fp8-blocks": mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG,
    }
    for name, form in forms.items():
        model = tiny_llama(torch.bfloat16)
        mtq.quantize(model, form, lambda own: own(torch.arange(8)[None]))
        with tempfile.TemporaryDirectory() as folder:
            export_hf_checkpoint(model, export_dir=folder)
            stored = load_file(Path(folder) / "model.safetensors")
            plain = {"model.norm.weight": stored["model.norm.weight"].float()}
            for layer in linear_layers(model):
                weight, scale = stored[f"{layer}.weight"], stored.get(f"{layer}.weight_scale")
                if weight.dtype == torch.float8_e4m3fn:
                    # in float32: in bfloat16 it rounds the scales first
                    own = FP8QTensor(weight.shape, torch.float32, weight)
                    plain[f"{layer}.weight"] = own.dequantize(scale=scale[:, None] if scale.ndim == 1 else scale)
            save(name, "nvidia-modelopt", folder, plain)


if __name__ == "__main__":
    makers = (compressed_tensors, act_order, gptq, awq, modelopt)
    {maker.__name__: maker for maker in makers}[sys.argv[1]]()
