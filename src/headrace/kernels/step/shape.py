"""Which decoders the persistent decode step serves, and what its source is compiled with for one of them.

What lives here: judging a DecoderSpec, the compiler's options. What may not: torch, compiling, launching.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.spec import Activation, DecoderSpec, NormKind

_PARTS = ("types.cuh", "machine.cuh", "product.cuh", "attention.cuh", "ends.cuh")
SOURCES = (
    "build/early.cuh",
    "attention/kv_codes.cuh",
    *(f"step/step_{part}" for part in _PARTS),
    "step/decode_step.cu",
)
WARPS = 8
HEAD_DIMS = (64, 128)
_ROWS = 8  # sequences of a step, at most
_TILE = 8  # rows of a weight
_CHUNK = 512  # elements of a row that a warp asks for at once
_MOST_TILES = 4  # of the residual that a program keeps
_MOST_VALUES = 512  # of a group of heads
_MOST_LAYERS = 64  # whose weights' places fit into shared memory


@dataclass(frozen=True, slots=True)
class StepShape:
    """Everything that the machine code depends on."""

    spec: DecoderSpec
    block_size: int
    programs: int  # one a multiprocessor
    fp8: bool = False  # weights, with a scale a row
    kv: int = 0  # codes of keys and values, as triton_codes.KINDS has them; 0: bfloat16

    def options(self) -> tuple[str, ...]:
        spec = self.spec
        values = {
            "HIDDEN": spec.hidden_size,
            "INNER": spec.intermediate_size,
            "HQ": spec.num_heads,
            "HK": spec.num_kv_heads,
            "D": spec.head_dim,
            "LAYERS": spec.num_layers,
            "BLOCK": self.block_size,
            "GRID": self.programs,
            "ROWS": _ROWS,
            "KV": self.kv,
        }
        if self.fp8:  # as many bytes under way as in bfloat16
            values |= {"FP8": 1, "SLOTS": 4}
        return ("--gpu-architecture=sm_90a", "--std=c++17", *(f"-D{name}={value}" for name, value in values.items()))


def why_not(spec: DecoderSpec, programs: int) -> str | None:
    """The first reason why a decoder is not served; None if it is."""
    return next(_reasons(spec, programs), None)


def _reasons(spec: DecoderSpec, programs: int) -> Iterator[str]:
    yield from beyond_plain(spec)
    if spec.head_dim not in HEAD_DIMS:
        yield f"head_dim {spec.head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    group = spec.num_heads // max(1, spec.num_kv_heads)
    if spec.num_heads % max(1, spec.num_kv_heads) or not 1 <= group <= 8 or group * spec.head_dim > _MOST_VALUES:
        yield f"{spec.num_heads} heads of {spec.head_dim} over {spec.num_kv_heads} KV heads are no group of up to {_MOST_VALUES} values"
    if spec.num_layers > _MOST_LAYERS:
        yield f"{spec.num_layers} layers are more than {_MOST_LAYERS}"
    yield from _sizes(spec, programs)


def beyond_plain(spec: DecoderSpec) -> Iterator[str]:
    """What this decoder computes beyond norm, attention, norm and gated feed-forward."""
    beyond = {
        "layers of experts": any(layer.moe is not None for layer in spec.layers),
        "sliding windows": any(layer.window is not None for layer in spec.layers),
        "scores divided by layer": any(layer.attention_divisor != 1.0 for layer in spec.layers),
        "learned positions": spec.rope is None,
        "heads rotated in part": spec.rope is not None and spec.rope.rotary_dim != spec.head_dim,
        "norms of heads": spec.qk_norm,
        "norms after each half": spec.sandwich_norm,
        "layer norms": spec.norm is not NormKind.RMS,
        "norm weights with an offset": spec.norm_offset != 0.0,
        "biases": spec.qkv_bias or spec.output_bias or spec.mlp_bias,
        "a cap on scores": spec.attention_soft_cap is not None,
        "a feed-forward without SiLU gate": not spec.gated_mlp or spec.activation is not Activation.SILU,
        "a scaled embedding": spec.embedding_scale is not None,
    }
    yield from (f"the decoder has {name}, which the one kernel does not compute" for name, has in beyond.items() if has)


def _sizes(spec: DecoderSpec, programs: int) -> Iterator[str]:
    """Whether every K can be dealt to the warps, and the tiles to the programs."""
    attended = spec.num_heads * spec.head_dim
    ks = {"hidden size": spec.hidden_size, "width of the heads": attended, "inner size": spec.intermediate_size}
    for name, k in ks.items():
        if not _deals(k):
            yield f"the {name} {k} cannot be dealt to {WARPS} warps in chunks of 32 to {_CHUNK}"
    tiles = spec.hidden_size // _TILE
    if tiles < programs or -(-tiles // programs) > _MOST_TILES:
        yield f"the hidden size {spec.hidden_size} does not give each of {programs} programs 1 to {_MOST_TILES} tiles of {_TILE} rows"


def _deals(k: int) -> bool:
    """As ``Shape`` of the source does it: a slice for each warp of a team, in equal chunks."""
    team = WARPS // (4 if k // WARPS <= 128 else 2 if k // WARPS <= 256 else 1)
    piece = k // team
    chunks = -(-piece // _CHUNK)
    return k % (WARPS * 32) == 0 and piece % (chunks * 32) == 0
