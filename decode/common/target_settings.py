"""Settings of the target that commands share: which one, where its weights are, and which tokens it may write.

Nothing here imports torch, so that commands can say their --help at once.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from decode.common.ranges import CountOrZero, DtypeName, Temperature, TopP, at_least

QUANTIZED_DTYPES = ("int8", "int8_bfloat16", "w8a8", "w4a8", "int4")
"""Values of `dtype` that round a model's weights once it is loaded; int4 is for drafts."""


@dataclass(frozen=True)
class SamplingParams:
    """Temperature, top-k and top-p of sampling; temperature 0 is greedy decoding."""

    temperature: Temperature = 0.0
    """0 takes the most probable token; 1 samples the model's unchanged distribution."""
    top_k: CountOrZero = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: TopP = 1.0
    """Keep the smallest set of most probable tokens with at least this total probability; 1 keeps all."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class ConstraintConfig:
    """What texts are allowed; at most one of the three."""

    json_schema: str = ""
    """A JSON schema: a file, or the schema itself, {…}. `"x-guidance": {"whitespace_flexible": false}` in it forbids
    optional white space, which forces more tokens."""
    regex: str = ""
    """A regular expression that the whole text matches."""
    grammar: str = ""
    """A file with a Lark grammar in the dialect of llguidance; its rule `start` is the whole text."""


@dataclass(frozen=True)
class PlacementConfig:
    """Where the target's weights are, if one device cannot hold them."""

    kind: Literal["single", "tensor_parallel", "device_map"] = "single"
    """single: on one device. tensor_parallel: every process of the launch holds a slice of each layer, and the first
    one runs the command. device_map: one process puts layers on all its GPUs, then in CPU memory, then on disk."""
    max_gib: dict[str, Annotated[float, at_least(0)]] = field(default_factory=dict)
    """device_map: GiB of weights that devices may hold, in the order in which they are filled, such as
    '{cuda:0: 10, cuda:1: 70, cpu: 200}'; what fits nowhere stays on disk. The first one holds embedding and LM head.
    Empty: 40 % of what is free on the first device, where the draft is as well, and 80 % on the others."""
    offload_folder: str = ""
    """device_map: folder for weights on disk that must be converted first, such as experts that are stacked; others are
    read from the target's files. Empty: a temporary one, which is deleted at the end."""


@dataclass
class TargetSettings:
    """Which target, and as what it is loaded: what most commands with a target can be told."""

    target: str = "assets/target"
    """The target model: a folder, a GGUF file or a Hub name."""
    revision: str | None = None
    """Commit, tag or branch of a target on the Hub."""
    tokenizer: str = ""
    """For a GGUF whose own tokenizer is refused: a folder or Hub name with the same tokens. Its ids are taken from then
    on, by commands without this setting too."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""
    dtype: DtypeName = "float32"
    """float32, bfloat16, float16; w8a8 (weights and activations of linear layers in eight bits; on a CPU); w4a8 (the
    same, but weights that have four bits already, as in a GGUF of Q4_K_M, stay so; on a CPU with AVX512-VNNI and a C++
    compiler); int8 or int8_bfloat16 (weights in eight bits, by torchao). The output is that of the target in this
    dtype. Losslessness to the token is a property of computing in float32."""


@dataclass
class PlacedTargetSettings(TargetSettings):
    placement: PlacementConfig = field(default_factory=PlacementConfig)
