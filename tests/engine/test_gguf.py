"""GGUF files hold the same model as the folders they were made from: weights, shape, tokenizer, template."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from headrace.config import ModelConfig
from headrace.engine.tokenizer import load_tokenizer
from headrace.errors import ModelError
from headrace.models.families import spec_from_config
from headrace.models.gguf_file import read_gguf
from headrace.models.loader import open_checkpoint
from headrace.models.source import find_model
from tests.support import tiny
from tests.support.gguf_files import write_gguf
from tests.support.outside import shared

FAMILIES = [
    "llama",
    "llama3",
    "llama-linear",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3-yarn",
    "qwen3-moe",
    "mixtral",
    "gemma2",
    "phi3",
    "phi3-longrope",
    "starcoder",
    "gpt2",
]
# What GGUF has no word for, at the value that is assumed.
NOT_KEPT: dict[str, dict[str, object]] = {
    "gemma2": {"query_pre_attn_scalar": 24},
    "gpt2": {"scale_attn_by_inverse_layer_idx": False},
}


def source_of(path: Path):
    return find_model(ModelConfig(model=str(path), quantization="none"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_in_gguf_is_the_same_model(name: str, tmp_path: Path) -> None:
    folder = tiny.save(name, tmp_path / "folder", **NOT_KEPT.get(name, {}))
    original, converted = source_of(folder), source_of(write_gguf(folder, tmp_path / "model.gguf"))
    assert spec_from_config(converted.config) == spec_from_config(original.config)
    want, got = open_checkpoint(original), open_checkpoint(converted)
    assert set(got.keys()) == set(want.keys())
    for key in want.keys():  # noqa: SIM118 - a protocol, not a mapping
        assert got.shape(key) == want.shape(key), key
        assert torch.equal(got.read(key), want.read(key)) or name == "gemma2", key
        torch.testing.assert_close(got.read(key), want.read(key), rtol=0, atol=1e-6)  # gemma2: w + 1 - 1


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [(Q.F16, 2e-3), (Q.BF16, 2e-2), (Q.Q8_0, 2e-2), (Q.Q4_0, 0.3), (Q.Q5_1, 0.2)],
    ids=lambda value: str(value),
)
def test_other_precisions(kind: Q, tolerance: float, tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path / "folder")
    want, got = (
        open_checkpoint(source_of(folder)),
        open_checkpoint(source_of(write_gguf(folder, tmp_path / "model.gguf", kind=kind))),
    )
    plain = {Q.F16: torch.float16, Q.BF16: torch.bfloat16}
    for key in want.keys():  # noqa: SIM118
        if want.read(key).dim() == 2:
            assert got.dtype(key) == got.read(key).dtype == plain.get(kind, torch.float32)
        torch.testing.assert_close(
            got.read(key).float(), want.read(key), rtol=tolerance, atol=tolerance * want.read(key).abs().max().item()
        )


def test_shards_are_one_model(tmp_path: Path) -> None:
    folder = tiny.save("llama", tmp_path / "folder")
    whole, first = (
        open_checkpoint(source_of(folder)),
        write_gguf(folder, tmp_path / "shards" / "tiny-Q8_0.gguf", shards_of=7),
    )
    assert first.name.startswith("tiny-Q8_0-00001-of-0000") and len(list(first.parent.iterdir())) > 2
    for path in (first, first.parent):
        source = source_of(path)
        got = open_checkpoint(source)
        assert load_tokenizer(source) is not None and set(got.keys()) == set(whole.keys())
        assert all(torch.equal(got.read(key), whole.read(key)) for key in whole.keys())  # noqa: SIM118


def test_shards_that_are_not_all_there(tmp_path: Path) -> None:
    first = write_gguf(tiny.save("llama", tmp_path / "folder"), tmp_path / "shards" / "tiny.gguf", shards_of=7)
    second = first.with_name(first.name.replace("00001-of", "00002-of"))
    with pytest.raises(ModelError, match=rf"is shard 2 of \d+; name the first, .*{first.name}"):
        read_gguf(second)
    second.rename(tmp_path / "away")
    with pytest.raises(ModelError, match=rf"lacks 1 of \d+ shards \(first: {second.name}\); download them"):
        read_gguf(first)
    write_gguf(tmp_path / "folder", second)  # the whole model in a shard's place
    with pytest.raises(ModelError, match=r"shards hold \d+ tensors, \d+ of them different, but should hold \d+"):
        read_gguf(first)
    with pytest.raises(ModelError, match="give it the name it had, which ends in -00001-of-"):
        read_gguf(first.rename(tmp_path / "renamed.gguf"))


def test_single_experts_of_older_files_are_found(tmp_path: Path) -> None:
    """Before experts were stacked, each had tensors of its own."""
    from headrace.models.gguf_file import GGUFFile, GGUFTensor
    from headrace.models.gguf_names import origins

    file = GGUFFile(tmp_path, {}, {"blk.1.ffn_gate.3.weight": GGUFTensor(0, (8, 4), 0, tmp_path)})
    config = {"model_type": "mixtral", "num_attention_heads": 2, "num_key_value_heads": 1}
    assert list(origins(file, config)) == ["model.layers.1.block_sparse_moe.experts.3.w1.weight"]


def test_tokenizer_and_template_come_along(tmp_path: Path) -> None:
    folder = tiny.save("qwen3", tmp_path / "folder")
    extra = {"tokenizer.chat_template": tiny.CHAT_TEMPLATE}
    want, got = (
        load_tokenizer(source_of(folder)),
        load_tokenizer(source_of(write_gguf(folder, tmp_path / "m.gguf", metadata=extra))),
    )
    assert want is not None and got is not None
    for text in ("The wheel turns", "Zwölf Räder, 水は流れる。 1234", "<|start|>x<|end|>", ""):
        assert got.encode(text, add_special_tokens=False) == want.encode(text, add_special_tokens=False)
    assert (got.bos_token_id, got.eos_token_id) == (want.bos_token_id, want.eos_token_id)
    messages = [{"role": "user", "content": "hi"}]
    assert got.apply_chat_template(messages) == want.apply_chat_template(messages)


def test_the_trained_model_is_the_same_in_both_formats() -> None:
    folder = shared("data", "stories260k")
    want, got = open_checkpoint(source_of(folder)), open_checkpoint(source_of(folder / "stories260K-f32.gguf"))
    assert set(got.keys()) - set(want.keys()) == {"lm_head.weight"}
    assert torch.equal(got.read("lm_head.weight"), want.read("model.embed_tokens.weight"))
    for key in want.keys():  # noqa: SIM118
        assert torch.equal(got.read(key), want.read(key)), key


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="'rwkv7', which is not supported; supported are llama"):
        source_of(tmp_path / "m.gguf")


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    whole = write_gguf(tiny.save("llama", tmp_path / "folder"), tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole[:-100])
    with pytest.raises(ModelError, match=r"truncated: .* ends at"):
        open_checkpoint(source_of(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("kind", "sentence"), [("trailing", "the end follows"), ("overlap", "overlaps the tensor before it by")]
)
def test_bytes_of_two_tensors_or_of_none_are_refused(kind: str, sentence: str, tmp_path: Path) -> None:
    file = write_gguf(tiny.save("llama", tmp_path / "folder"), tmp_path / "m.gguf")
    whole = bytearray(file.read_bytes())
    if kind == "trailing":
        whole += bytes(100)
    else:  # the last tensor of the table lies where the first does
        last = max(read_gguf(file).tensors, key=lambda name: read_gguf(file).tensors[name].start)
        at = whole.rindex(last.encode()) + len(last)
        dims = struct.unpack_from("<I", whole, at)[0]
        struct.pack_into("<Q", whole, at + 4 + 8 * dims + 4, 0)
    file.write_bytes(whole)
    with pytest.raises(ModelError, match=sentence):
        open_checkpoint(source_of(file))


def test_a_head_is_bounded_whatever_the_file_holds(tmp_path: Path) -> None:
    """Arrays and texts that the file has room for and no model needs; the file has holes, so it takes no disk."""
    key = struct.pack("<Q", 1) + b"k"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key
    for value in (
        struct.pack("<IIQ", 9, 0, 1 << 29),
        struct.pack("<IIQ", 9, 8, 1 << 27),
        struct.pack("<IQ", 8, 1 << 29),
    ):
        with (tmp_path / "m.gguf").open("wb") as stream:
            stream.write(head + value)
            stream.truncate(2 << 30)
        begun = time.perf_counter()
        with pytest.raises(ModelError, match="damaged or truncated"):
            read_gguf(tmp_path / "m.gguf")
        assert time.perf_counter() - begun < 0.5


def test_damaged_heads_are_refused_and_never_crash(tmp_path: Path) -> None:
    """Every byte of the head set to each of a few values, and the file cut anywhere: an error or a readable file."""
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.0])
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole, refused = file.read_bytes(), 0
    head = len(whole) - 256
    for index in range(head):
        for value in (0x00, 0x7F, 0xFF):
            file.write_bytes(whole[:index] + bytes([value]) + whole[index + 1 :])
            refused += not _readable(file)
    for cut in range(0, head - 32, 3):  # the last bytes before the data may be padding
        file.write_bytes(whole[:cut])
        assert not _readable(file)
    assert refused > head  # most of the head matters


def _readable(file: Path) -> bool:
    from headrace.models import gguf_file

    gguf_file._read_cached.cache_clear()
    try:
        read_gguf(file)
    except ModelError:
        return False
    return True


def test_sizes_are_checked_before_memory_is_taken(tmp_path: Path) -> None:
    """A string of 2^60 bytes in a file of 60."""
    key = b"general.name"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    (tmp_path / "m.gguf").write_bytes(head + struct.pack("<IQ", 8, 2**60) + b"x" * 16)
    with pytest.raises(ModelError, match="damaged or truncated"):
        read_gguf(tmp_path / "m.gguf")
