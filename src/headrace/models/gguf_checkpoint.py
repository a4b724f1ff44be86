"""A GGUF file's tensors as a Checkpoint: in Hugging Face's layout, quantized ones as rows of bytes or dequantized.

What lives here: reading bytes, calling the gguf library's dequantizers, and undoing what the converter changed. What
may not: names (gguf_names.py), the container (gguf_file.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ModelError
from headrace.models.checkpoint import MappedFiles
from headrace.models.gguf_config import read_gguf_config
from headrace.models.gguf_file import BF16, F16, F32, GGUFTensor, read_gguf
from headrace.models.gguf_names import Change, Origin, origins

_PLAIN: Mapping[int, torch.dtype] = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
_CHUNK_ELEMENTS = 1 << 22  # dequantised at a time: the library's temporaries are several times its result


class GGUFCheckpoint:
    """Tensors of F32, F16 and BF16 are views of the file; others are dequantized to float32 when they are read, or with
    ``packed`` are the bytes of their rows."""

    def __init__(self, path: Path, *, packed: bool = False) -> None:
        file = read_gguf(path)
        config, _ = read_gguf_config(path)
        self._tensors = file.tensors
        self._origins = origins(file, config)
        self._files = MappedFiles()
        self._packed = packed
        self._alignment = file.get("general.alignment", int) or 32
        self._check_sizes()

    def keys(self) -> Iterable[str]:
        return self._origins.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        origin = self._origins[key]
        tensor = self._tensors[origin.tensor]
        shape = tensor.shape if origin.part is None else tensor.shape[1:]
        if self._is_packed(tensor):
            elements, size = _block_sizes()[tensor.type]
            return (*shape[:-1], shape[-1] // elements * size)
        return tuple(reversed(shape)) if origin.change is Change.TRANSPOSED else shape

    def dtype(self, key: str) -> torch.dtype:
        tensor = self._tensors[self._origins[key].tensor]
        return torch.uint8 if self._is_packed(tensor) else _PLAIN.get(tensor.type, torch.float32)

    def read(self, key: str) -> Tensor:
        origin = self._origins[key]
        values = self._values(origin)
        if self._is_packed(self._tensors[origin.tensor]):
            values = values.view(self.shape(key))
            return _restored(values, origin) if origin.change is Change.INTERLEAVED else values
        return _restored(values, origin)

    def close(self) -> None:
        self._files.close()

    def _values(self, origin: Origin) -> Tensor:
        """The tensor, or one of the slices it stacks, as stored."""
        tensor = self._tensors[origin.tensor]
        shape, start, size = tensor.shape, tensor.start, _num_bytes(tensor)
        if origin.part is not None:
            shape, size = shape[1:], size // shape[0]
            start += origin.part * size
        if tensor.type in _PLAIN:
            return self._files.tensor(tensor.file, _PLAIN[tensor.type], start, size).view(shape)
        data = self._files.tensor(tensor.file, torch.uint8, start, size)
        return data if self._is_packed(tensor) else _dequantised(data, tensor.type).view(shape)

    def _is_packed(self, tensor: GGUFTensor) -> bool:
        return self._packed and tensor.type not in _PLAIN and len(tensor.shape) >= 2

    def _check_sizes(self) -> None:
        sizes = {file: file.stat().st_size for file in {tensor.file for tensor in self._tensors.values()}}
        for name, tensor in self._tensors.items():
            if tensor.type not in _block_sizes():
                raise ModelError(
                    f"{tensor.file}: tensor {name[:80]} has GGUF type {tensor.type}, which is not known; convert the model to F16, BF16 or Q8_0."
                )
            per_block, _ = _block_sizes()[tensor.type]
            if tensor.shape and tensor.shape[-1] % per_block:
                raise ModelError(
                    f"{tensor.file} is damaged: rows of {name[:80]} have {tensor.shape[-1]} "
                    f"elements, not a multiple of {per_block}. Download it again."
                )
            end = tensor.start + _num_bytes(tensor)
            if end > sizes[tensor.file]:
                raise ModelError(
                    f"{tensor.file} is truncated: {sizes[tensor.file]} bytes, but tensor {name[:80]} ends at {end}. Download it again."
                )
        for path, size in sizes.items():
            self._check_gapless(path, size)

    def _check_gapless(self, path: Path, size: int) -> None:
        """Tensors are disjoint, and there is nothing but padding between and after them."""
        placed = sorted(
            (tensor.start, tensor.start + _num_bytes(tensor), name)
            for name, tensor in self._tensors.items()
            if tensor.file == path
        )
        at = placed[0][0]
        for start, end, name in [*placed, (size, size, "the end")]:
            if not 0 <= start - at < self._alignment:
                what = (
                    f"overlaps the tensor before it by {at - start} bytes"
                    if start < at
                    else f"follows {start - at} stray bytes"
                )
                raise ModelError(f"{path} is damaged: {name[:80]} {what}. Download it again.")
            at = end


@cache
def _block_sizes() -> Mapping[int, tuple[int, int]]:
    """type → (elements, bytes) of one quantization block. Imported here, so that only GGUF models load the library."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


def _num_bytes(tensor: GGUFTensor) -> int:
    elements, size = _block_sizes()[tensor.type]
    return math.prod(tensor.shape) // elements * size


def _dequantised(data: Tensor, kind: int) -> Tensor:
    """Flat float32 from flat quantized bytes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    quant = GGMLQuantizationType(kind)
    elements, size = GGML_QUANT_SIZES[quant]
    blocks = data.numpy().reshape(-1, size)
    result = np.empty((len(blocks), elements), dtype=np.float32)
    step = max(1, _CHUNK_ELEMENTS // elements)
    for start in range(0, len(blocks), step):
        try:
            result[start : start + step] = dequantize(blocks[start : start + step], quant).reshape(-1, elements)
        except NotImplementedError as error:
            raise ModelError(
                f"weights of GGUF type {quant.name} cannot be dequantized; use a file in F16, BF16, Q8_0 or a K-quant."
            ) from error
    return torch.from_numpy(result).flatten()


def converted(tensor: Tensor, origin: Origin) -> Tensor:
    """As a converter writes what a checkpoint holds; of blocks, rows of bytes. Not of transposed tensors."""
    if origin.change is Change.INTERLEAVED:
        halves = tensor.reshape(origin.heads, 2, -1, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor.float() + 1.0 if origin.change is Change.PLUS_ONE else tensor


def _restored(tensor: Tensor, origin: Origin) -> Tensor:
    if origin.change is Change.INTERLEAVED:
        # [heads, head_dim / 2, 2, …] → [heads, 2, head_dim / 2, …]: neighbours (2i, 2i + 1) become halves (i, i +
        # head_dim / 2)
        split = tensor.reshape(origin.heads, -1, 2, *tensor.shape[1:])
        return split.transpose(1, 2).reshape(tensor.shape)
    if origin.change is Change.TRANSPOSED:
        return tensor.t()
    return tensor - 1.0 if origin.change is Change.PLUS_ONE else tensor
