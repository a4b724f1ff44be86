"""The persistent decode step: all layers of a small batch in one launch (from step_types.cuh to decode_step.cu).

What lives here: what the kernel is given, its scratch memory, which steps it takes. What may not: which decoders
(shape.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import c_float, c_int, c_longlong, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.attention.kv_codes import KINDS
from headrace.kernels.build import nvrtc
from headrace.kernels.build.driver import Function
from headrace.kernels.build.variants import Variants
from headrace.kernels.inputs import ForwardInputs
from headrace.kernels.step.reference import MOST_ROWS, StepWeights, longest_context
from headrace.kernels.step.shape import SOURCES, WARPS, StepShape
from headrace.sites import Role, layer_matrices
from headrace.spec import DecoderSpec, KVFormat

_NAME = "decode_step"
_UNBUILT = "the persistent decode step cannot be built here; steps are computed layer by layer"
_THREADS = 32 * WARPS
_POINTERS = (
    "layers", "embedding", "final_norm", "token_ids", "positions", "slots", "context", "block_table", "cos_sin", "kv", "out",
    "exchange", "parts", "peaks", "tickets",
)  # fmt: skip
_KEYS = 16  # that a warp takes from one block at once


class _Parameters(ctypes.Structure):
    """As ``Params`` of the source."""

    _fields_ = (
        *((name, c_void_p) for name in _POINTERS),
        ("block_stride", c_longlong),
        ("table_stride", c_int),
        ("batch", c_int),
        ("eps", c_float),
        ("scale", c_float),
    )


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What programs leave for each other within one launch, which leaves it as it was made: for the next one, which may
    begin early."""

    exchange: Tensor  # bytes; all ones say that nothing has come yet
    parts: Tensor  # [programs, group, head_dim], float32
    peaks: Tensor  # [programs, 2, group], float32
    tickets: Tensor  # [rows, kv_heads], int32


class DecodeSteps:
    """Makes the decode step of a decoder from its weights; its machine code is built once for each block size.

    Where it cannot be built or loaded, every step is declined: the decoder's own layers stand behind it.
    ``pdl``: it begins while the kernel before still runs. ``fp8``: weights have a scale a row; inputs stay bfloat16.
    ``kv``: keys and values are codes of 8 bits.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        device: torch.device,
        *,
        pdl: bool = False,
        fp8: bool = False,
        kv: KVFormat | None = None,
    ) -> None:
        self.spec, self.pdl, self.fp8, self.kv = spec, pdl, fp8, kv
        self._variants = Variants(device, _NAME, _machine_code)
        self.programs = self._variants.processors

    def __call__(self, weights: StepWeights) -> DecodeStep:
        return DecodeStep(self, weights)

    def prepare(self, block_size: int) -> Function | None:
        """Built, or kept from before; None where that is not possible."""
        if block_size % _KEYS:
            return None
        kind = 0 if self.kv is None else KINDS[self.kv.codes]
        function = self._variants.find(StepShape(self.spec, block_size, self.programs, self.fp8, kind), _UNBUILT)
        if function is not None:
            function.number("exchange_bytes")  # nothing is read from the device later, when a step may be captured
        return function


def _machine_code(shape: StepShape) -> bytes:
    return nvrtc.build(nvrtc.source(*SOURCES), shape.options())


class DecodeStep:
    """One decoder's. ``(inputs, kv_caches)`` → hidden states after the last norm [tokens, hidden]; None: this step is
    not for it."""

    def __init__(self, steps: DecodeSteps, weights: StepWeights) -> None:
        self._steps = steps
        self._weights = weights
        assert bool(weights.scales) == steps.fp8 and bool(weights.quantized) == (steps.kv is not None)
        none: tuple[Tensor | None, ...] = ()
        scales = weights.scales or (none,) * len(weights.layers)
        shared = tuple((each.k_scales, each.v_scales) for each in weights.quantized) or (none,) * len(weights.layers)
        pointers = [
            [each.data_ptr() for part in parts for each in part if each is not None]
            for parts in zip(weights.layers, scales, shared, strict=True)
        ]
        self._layers = torch.tensor(pointers, dtype=torch.int64).to(weights.embedding.device)
        # now: nothing is being captured
        self._scratch = _make_scratch(steps.spec, steps.programs, weights.embedding.device)

    def __call__(self, inputs: ForwardInputs, kv_caches: Sequence[Tensor]) -> Tensor | None:
        tokens, attention = inputs.token_ids.shape[0], inputs.attention[0]
        if (
            attention.max_query_len != 1
            or attention.context_len.shape[0] != tokens
            or attention.max_context_len > longest_context(tokens)
        ):
            return None
        if attention.chained and self._steps.kv is not None:  # codes that another program is about to write
            return None
        if (function := self._steps.prepare(attention.block_size)) is None:
            return None
        cache, embedding = kv_caches[0], self._weights.embedding
        assert cache[0].is_contiguous() and attention.block_table.stride(1) == 1
        assert self._scratch.exchange.numel() >= function.number("exchange_bytes")
        out = torch.empty((tokens, embedding.shape[1]), dtype=embedding.dtype, device=embedding.device)
        parameters = self._parameters(inputs, cache, out, self._scratch)
        self._launch(function, torch.cuda.current_stream(embedding.device).cuda_stream, parameters)
        return out

    def longest(self, rows: int, block_size: int) -> int:
        """Up to which context it takes steps of so many rows; 0: it takes none, or cannot be built for such blocks."""
        most = longest_context(rows)
        return most if most and self._steps.prepare(block_size) is not None else 0

    def _launch(self, function: Function, stream: int, parameters: _Parameters) -> None:
        """Programs wait for each other, so all of them have to come to be on the device at once. A launch that says so
        begins when the one before has ended. One that begins earlier says nothing: there are as many programs as
        processors and each takes a whole one, so the last of them comes when the kernel before has left its processor,
        which waits for nobody here. The kernel after this one is let in by programs that run, that is, once all of them
        do. This holds for one stream: of two such launches at once each might have some of the processors.
        """
        if self._steps.pdl:
            function.launch(self._steps.programs, _THREADS, stream, parameters, pdl=True)
        else:
            function.launch_together(self._steps.programs, _THREADS, stream, parameters)

    def _parameters(self, inputs: ForwardInputs, cache: Tensor, out: Tensor, scratch: _Scratch) -> _Parameters:
        weights, attention = self._weights, inputs.attention[0]
        tensors: Iterable[Tensor] = (
            self._layers, weights.embedding, weights.norm, inputs.token_ids, inputs.positions, attention.slots, attention.context_len,
            attention.block_table, weights.cos_sin, cache, out, scratch.exchange, scratch.parts, scratch.peaks, scratch.tickets,
        )  # fmt: skip
        table_stride = attention.block_table.stride(0)
        stride = cache.stride(0) * cache.element_size()
        return _Parameters(
            *(each.data_ptr() for each in tensors), stride, table_stride, len(out), weights.eps, weights.scale
        )


def _make_scratch(spec: DecoderSpec, programs: int, device: torch.device) -> _Scratch:
    group, sites = spec.num_heads // spec.num_kv_heads, layer_matrices(spec, 0)
    attention, down = sites[Role.QKV].outs + sites[Role.OUTPUT].ins, sites[Role.DOWN]
    handed = attention + 2 * down.outs + down.ins  # values of a row in a layer
    layer = 2 * MOST_ROWS * (handed + 4 * programs) + 16  # bytes: values, and sums of squares twice
    size = 2 * layer + 4 * MOST_ROWS * programs  # layers take turns; and the last norm's sums
    return _Scratch(
        torch.full((size,), 0xFF, dtype=torch.uint8, device=device),
        torch.empty((programs, group, spec.head_dim), dtype=torch.float32, device=device),
        torch.empty((programs, 2, group), dtype=torch.float32, device=device),
        torch.zeros(MOST_ROWS * spec.num_kv_heads, dtype=torch.int32, device=device),
    )
