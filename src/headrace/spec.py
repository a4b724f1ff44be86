"""A model's shape as data: everything the cost model, the cache and the decoder need to know, and no tensor.

What lives here: frozen descriptions. What may not: torch, file reading, names of model families
(models/families.py normalises a Hugging Face config into a DecoderSpec).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.quant import Format

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

# Weights that are held in another form than the type the model computes in: (a weight's own name, the format of each
# part stored apart).
Formats = tuple[tuple[str, tuple["Format", ...]], ...]


class NormKind(str, Enum):
    RMS = "rms"
    LAYER = "layer"


class Activation(str, Enum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of the first ``rotary_dim`` elements of a head, rotated as two halves.

    ``kind``: "default", "linear", "llama3", "yarn" or "longrope". ``original_max_positions`` is the trained length that
    llama3, yarn and longrope scale from. ``attention_factor`` (yarn, longrope) multiplies cos and sin. ``short_factor``
    and ``long_factor`` (length rotary_dim / 2) belong to longrope alone: short serves a context of up to
    ``original_max_positions`` tokens, long a longer one; one of them is chosen for the whole run, by max_model_len.
    Sources: RoFormer (Su et al. 2021), YaRN (Peng et al. 2023), LongRoPE (Ding et al. 2024), Llama 3 as published.
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """An expert that a rank holds. Of ``copies`` on as many ranks it is number ``copy``, which computes every
    ``copies``-th row of a step."""

    expert: int
    copy: int = 0
    copies: int = 1


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Sparse feed-forward: ``top_k`` of ``num_experts`` experts a token; router weights renormalised or not. ``held``:
    what a rank has of the experts, if each has whole ones (parallel/placement.py); None: all of them, or a part of each."""

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    held: tuple[Held, ...] | None = None

    @property
    def experts(self) -> tuple[int, ...]:
        """Whose weights are here, in the order in which they are stacked."""
        return tuple(range(self.num_experts)) if self.held is None else tuple(each.expert for each in self.held)

    @property
    def part(self) -> float:
        """Of all pairs of token and expert that are computed here, if tokens pick experts evenly."""
        return 1.0 if self.held is None else sum(1.0 / each.copies for each in self.held) / self.num_experts


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs from layer to layer. ``window`` is the number of keys a query may see, itself included; None = all.

    ``moe`` None means a dense feed-forward. ``attention_divisor`` divides the model's attention_scale (GPT-2 variants
    that scale by depth). ``formats``: of this layer's matrices.
    """

    window: int | None = None
    moe: MoESpec | None = None
    attention_divisor: float = 1.0
    formats: Formats = ()


class PoolHead(str, Enum):
    """What is computed of a pooled hidden state."""

    NONE = ""  # it is the answer: an embedding
    LINEAR = "linear"  # a score: w · h (+ b)
    DENSE = "dense"  # a score: w · tanh(V h + c) + b, as BERT's
    TOKENS = "tokens"  # a score: the logit of one token less another's


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """What is made of a prompt in place of a next token.

    ``kind``: of its hidden states after the last norm, that of its "last" token, of its first ("cls"), or their "mean".
    ``normalize``: to length 1 (embeddings). ``tokens``: of TOKENS, the one that speaks for a match and the one that
    speaks against it. ``sigmoid``: of a score, where the logit itself is not asked for. ``width``: numbers of a result.
    """

    kind: str = "last"
    normalize: bool = False
    head: PoolHead = PoolHead.NONE
    tokens: tuple[int, ...] = ()
    sigmoid: bool = True
    width: int = 1

    @property
    def task(self) -> str:
        return "score" if self.head is not PoolHead.NONE else "embed"


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder-only transformer, or with ``causal`` off an encoder: every token sees all others, and nothing is
    cached. Sizes in elements, positions in tokens.

    ``layers`` has one entry a layer. ``max_positions`` is the longest context the model allows. ``rope`` None means
    learned positions (``max_positions`` rows). ``attention_scale`` multiplies q·k, then ``attention_soft_cap`` c turns
    a score s into c·tanh(s/c), as ``logits_soft_cap`` does with logits. ``norm_offset`` is added to norm weights
    (Gemma's 1 + w). ``sandwich_norm``: a norm after attention and after the feed-forward too (Gemma 2). ``qk_norm``: an
    RMS norm over each head of q and k, before rotation. ``norm`` LAYER has a weight and a bias. ``gated_mlp``:
    act(gate) · up instead of act(up). ``output_bias``: of the projection after attention. ``mlp_bias``: of both
    feed-forward projections. ``embedding_scale`` multiplies the token embedding. ``checkpoint_dtype`` is the config's
    word for its weights. ``pooling``: prompts are pooled, and there is no LM head of its own unless
    that needs one. ``post_norm``: norms stand on the residual stream itself, behind each addition (BERT), and before the
    first layer is one more. ``token_types``: rows of a second embedding; a token of type k has the id of the token plus
    k · vocab_size. ``first_position``: the row of the first learned position, of ``position_rows`` (0: as many as
    ``max_positions``). ``formats``: of the matrices outside the layers. ``ranks`` share it: heads and inner widths
    are one rank's then (parallel/shares.py), and so are ``vocab_rows``. ``predicting``: layers for multi-token
    prediction that its checkpoint numbers behind its own. ``held``: the first layer of a stage of a pipeline, and the one
    behind its last (parallel/stages.py); None: all.
    """

    family: str
    vocab_size: int  # rows of the embedding = width of the logits
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    max_positions: int
    rope: RopeSpec | None
    norm: NormKind = NormKind.RMS
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    sandwich_norm: bool = False
    qk_norm: bool = False
    activation: Activation = Activation.SILU
    gated_mlp: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False
    attention_scale: float = 0.0  # every family fills it; 0 is refused by the decoder
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    embedding_scale: float | None = None
    causal: bool = True
    post_norm: bool = False
    token_types: int = 0
    first_position: int = 0
    position_rows: int = 0
    pooling: PoolingSpec | None = None
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str = "float32"
    formats: Formats = ()
    ranks: int = 1
    predicting: int = 0
    held: tuple[int, int] | None = None

    @property
    def held_layers(self) -> range:
        return range(self.num_layers) if self.held is None else range(*self.held)

    @property
    def embeds(self) -> bool:
        """It begins with token ids, not with another stage's hidden states."""
        return self.held_layers.start == 0

    @property
    def answers(self) -> bool:
        """It ends in logits."""
        return self.held_layers.stop == self.num_layers

    @property
    def vocab_rows(self) -> int:
        """Of the embedding and the head, on one rank; the last rank may have fewer tokens, and fills its rows up with
        zeros."""
        return -(-self.vocab_size // self.ranks)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def whole_prompts(self) -> bool:
        """A prompt is computed in one step: its tokens see, or its result takes in, all of it."""
        return not self.causal or (self.pooling is not None and self.pooling.kind != "last")

    @property
    def qkv_heads(self) -> tuple[int, int, int]:
        return self.num_heads, self.num_kv_heads, self.num_kv_heads


class KVKind(str, Enum):
    FULL = "full"
    SLIDING = "sliding"


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Keys and values in fewer bits than the model computes in: codes of ``bits``, and what turns them back.

    ``scales``: numbers in bfloat16 that each token of each head has, a scale and perhaps the value of code 0; 0: one
    scale a KV head for all tokens, the checkpoint's or 1.
    """

    name: str
    codes: str  # as torch names their type; uint4: two a byte, the even element in the low half
    bits: int
    scales: int

    def token_bytes(self, head_dim: int) -> int:
        """Of one token's keys, or values, in one head of one layer."""
        return head_dim * self.bits // 8 + 2 * self.scales

    def problem(self, head_dim: int) -> str | None:
        """Why heads of this size cannot be held so."""
        return (
            f"{head_dim} elements of a head are no whole bytes in {self.bits} bits"
            if head_dim * self.bits % 8
            else None
        )


KV_FORMATS = {
    each.name: each
    for each in (
        KVFormat("fp8_e4m3", "float8_e4m3fn", 8, 0),
        KVFormat("fp8_e5m2", "float8_e5m2", 8, 0),
        KVFormat("int8", "int8", 8, 1),
        KVFormat("int4", "uint4", 4, 2),
    )
}


@dataclass(frozen=True, slots=True)
class KVComponent:
    """One of the tensors that a block holds of each layer, for keys and for values, in each KV head."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class KVSpec:
    """One KV group: layers that share a block table, an allocation and a lifetime rule.

    The allocation is block-major, ``[num_blocks, layers, 2 (K, V), num_kv_heads, block_size, head_dim]``, so that a
    block of all its layers is one contiguous span. Ranks that share the keys hold an equal part of a block's tokens
    each. In a ``format`` the last dimension is of bytes (uint8), as many as a token takes, and each head's part of a
    block holds the codes of all its tokens, then their scales (``components``).
    """

    layers: tuple[int, ...]
    kind: KVKind
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    window: int | None = None  # tokens; sliding only
    format: KVFormat | None = None  # None: the type the model computes in
    beside: int = 0  # bytes a block of what else is kept under its number: a draft model's keys and values
    ranks: int = 1  # that share the keys

    @property
    def row_bytes(self) -> int:
        """Of one token's keys, or values, in one head of one layer."""
        return self.head_dim * self.dtype_bytes if self.format is None else self.format.token_bytes(self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Of all layers' keys and values."""
        return len(self.layers) * 2 * self.num_kv_heads * self.row_bytes

    @property
    def bytes_per_block(self) -> int:
        """On one rank."""
        return self.beside + self.token_bytes * self.held_tokens

    @property
    def held_tokens(self) -> int:
        """Of a block, on one rank."""
        return self.block_size // self.ranks

    @property
    def components(self) -> tuple[KVComponent, ...]:
        """In the order in which they lie in a head's part of a block."""
        if self.format is None:
            return (KVComponent("elements", (self.held_tokens, self.head_dim), ""),)
        codes = KVComponent("codes", (self.held_tokens, self.head_dim), self.format.codes)
        scales = KVComponent("scales", (self.held_tokens, self.format.scales), "bfloat16")
        return (codes, scales) if self.format.scales else (codes,)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One KV group as an executor holds it."""

    spec: KVSpec
    num_blocks: int


ADDRESS_UNIT = 64  # elements that an address of an adapter's factors counts: 31 bits reach 256 GiB of 16 bits each


@dataclass(frozen=True, slots=True)
class AdapterSpace:
    """How a device holds adapters: up to ``slots`` at once, ``most`` of them in one step, in so many ``blocks`` of
    their own; 0: in blocks of the first KV group. ``block_bytes``: of each, on one device; 0: unknown."""

    slots: int
    most: int
    blocks: int = 0
    block_bytes: int = 0


def attention_groups(spec: DecoderSpec) -> tuple[tuple[int | None, tuple[int, ...]], ...]:
    """(window, layers) of each KV group: layers that keep the same keys. Full attention first, windows in order of
    first appearance. An encoder keeps none: its one group counts tokens that are under way."""
    if not spec.causal:
        return ((None, ()),)
    by_window: dict[int | None, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        held = by_window.setdefault(layer.window, [])  # a stage has all groups, some without a layer
        if index in spec.held_layers:
            held.append(index)
    ordered = sorted(by_window.items(), key=lambda item: item[0] is not None)
    return tuple((window, tuple(layers)) for window, layers in ordered)


def kv_groups(
    spec: DecoderSpec, block_size: int, dtype_bytes: int, format: KVFormat | None = None, ranks: int = 1
) -> tuple[KVSpec, ...]:
    """The cache's view of ``attention_groups``: one KVSpec each, in that order. ``block_size``: tokens of a block on
    each of so many ``ranks`` that share the keys."""
    return tuple(
        KVSpec(
            layers=layers,
            kind=KVKind.FULL if window is None else KVKind.SLIDING,
            block_size=block_size * ranks,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype_bytes=dtype_bytes,
            window=window,
            format=format,
            ranks=ranks,
        )
        for window, layers in attention_groups(spec)
    )
