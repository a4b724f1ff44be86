"""Weights from safetensors: found, merged into place without a second copy, and refused in one sentence when they do
not fit."""

from __future__ import annotations

import json
import random
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from headrace.config import ModelConfig
from headrace.errors import ModelError
from headrace.kernels import Kernels
from headrace.models.decoder import Decoder
from headrace.models.families import spec_from_config
from headrace.models.loader import fill_dummy, load_weights, open_checkpoint
from headrace.models.source import ModelSource, find_model
from headrace.models.weight_rules import WeightRule, ignored_keys, weight_rules
from tests.support import tiny

CPU = torch.device("cpu")


def find(folder: Path, **options: str) -> ModelSource:
    return find_model(ModelConfig(model=str(folder), **options))


def decoder_of(source: ModelSource, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(spec_from_config(source.config), kernels=Kernels(CPU), dtype=dtype, device=CPU, max_model_len=64)


def load(source: ModelSource, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder, spec = decoder_of(source, dtype), spec_from_config(source.config)
    load_weights(decoder, open_checkpoint(source), weight_rules(spec), ignored_keys(spec), dtype)
    return decoder


def weights(decoder: nn.Module) -> dict[str, torch.Tensor]:
    return dict(decoder.named_parameters())


def edit(folder: Path, change) -> Path:
    """Rewrites the folder's single file after ``change(tensors)``."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


# --- loading ----------------------------------------------------------------------------------------------------------


def test_merged_parameters_hold_their_parts(tmp_path: Path) -> None:
    source = find(tiny.save("llama", tmp_path))
    loaded, stored = weights(load(source)), load_file(tmp_path / "model.safetensors")
    parts = [stored[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(loaded["layers.1.attention.qkv.weight"], torch.cat(parts))
    assert torch.equal(loaded["head.weight"], stored["lm_head.weight"])


def test_experts_are_stacked_and_matrices_transposed(tmp_path: Path) -> None:
    loaded, stored = (
        weights(load(find(tiny.save("mixtral", tmp_path / "m")))),
        load_file(tmp_path / "m" / "model.safetensors"),
    )
    expert = "model.layers.0.block_sparse_moe.experts.2."
    assert torch.equal(
        loaded["layers.0.feed_forward.up"][2], torch.cat([stored[expert + "w1.weight"], stored[expert + "w3.weight"]])
    )
    loaded, stored = (
        weights(load(find(tiny.save("gpt2", tmp_path / "g")))),
        load_file(tmp_path / "g" / "model.safetensors"),
    )
    assert torch.equal(loaded["layers.0.attention.qkv.weight"], stored["transformer.h.0.attn.c_attn.weight"].t())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_shards_and_names_without_a_prefix_are_the_same_model(name: str, tmp_path: Path) -> None:
    whole = weights(load(find(tiny.save(name, tmp_path / "whole"))))
    sharded = find(tiny.save(name, tmp_path / "sharded", shard_size="60KB"))
    assert len(list(sharded.path.glob("*.safetensors"))) > 2

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("model.").removeprefix("transformer.")] = tensors.pop(key)

    bare = find(edit(tiny.save(name, tmp_path / "bare"), strip))
    for other in (sharded, bare):
        assert all(torch.equal(tensor, whole[key]) for key, tensor in weights(load(other)).items())


def test_tensors_are_cast_while_they_are_copied(tmp_path: Path) -> None:
    source = find(tiny.save("qwen3", tmp_path))
    full, half = weights(load(source)), weights(load(source, torch.bfloat16))
    assert all(torch.equal(half[key], tensor.to(half[key].dtype)) for key, tensor in full.items())
    assert any(tensor.dtype is torch.bfloat16 for tensor in half.values())


def test_parameters_keep_their_storage(tmp_path: Path) -> None:
    """What others share with a parameter (a tied head) sees the weights too."""
    source = find(tiny.save("qwen3", tmp_path))
    decoder, spec = decoder_of(source), spec_from_config(source.config)
    before = {name: tensor.data_ptr() for name, tensor in weights(decoder).items()}
    load_weights(decoder, open_checkpoint(source), weight_rules(spec), ignored_keys(spec), torch.float32)
    assert {name: tensor.data_ptr() for name, tensor in weights(decoder).items()} == before


def test_loading_costs_no_second_copy(tmp_path: Path) -> None:
    """64 MiB of weights in 16 tensors: the memory of this process, mapped files included, grows by less than a few
    tensors."""
    count, size = 16, 1 << 21
    save_file(
        {f"t{i}": torch.full((size,), float(i), dtype=torch.bfloat16) for i in range(count)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text("{}")

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.Parameter(torch.zeros(count * size, dtype=torch.bfloat16), requires_grad=False)

    flat, rule = Flat(), WeightRule("all", (tuple(f"t{i}" for i in range(count)),), (count * size,))
    checkpoint, before, peak = open_checkpoint(find(tmp_path)), resident_bytes(), 0
    read = checkpoint.read

    def watched(key: str) -> torch.Tensor:
        nonlocal peak
        peak = max(peak, resident_bytes())
        return read(key)

    checkpoint.read = watched  # type: ignore[method-assign]
    load_weights(flat, checkpoint, [rule], (), torch.bfloat16)
    assert [flat.all[i * size].item() for i in range(count)] == list(range(count))
    assert max(peak, resident_bytes()) - before < 3 * size * 2


def resident_bytes() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * (int(status["VmRSS"].split()[0]) + int(status["VmSwap"].split()[0]))


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = edit(
        tiny.save("llama", tmp_path),
        lambda tensors: [tensors.pop(f"model.layers.{i}.mlp.up_proj.weight") for i in (0, 1)],
    )
    with pytest.raises(
        ModelError, match=r"lacks 2 of the tensors .*model\.layers\.0\.mlp\.up_proj\.weight, model\.layers\.1"
    ):
        load(find(folder))


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({f"model.layers.{i}.extra": torch.zeros(1) for i in range(5)})

    with pytest.raises(
        ModelError, match=r"holds 5 tensors that this model has no place for .first: model\.layers\.0\.extra, .*, …"
    ):
        load(find(edit(tiny.save("llama", tmp_path), add)))


def test_constants_that_old_checkpoints_store_are_ignored(tmp_path: Path) -> None:
    key = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(find(edit(tiny.save("llama", tmp_path), lambda tensors: tensors.update({key: torch.zeros(8)}))))


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    key = "model.layers.2.mlp.down_proj.weight"
    folder = edit(tiny.save("llama", tmp_path), lambda tensors: tensors.update({key: torch.zeros(64, 95)}))
    with pytest.raises(
        ModelError, match=r"layers\.2\.mlp\.down_proj\.weight has shape \[64, 95\], but the config calls for \[64, 96\]"
    ):
        load(find(folder))


def test_integers_where_floats_belong_are_named(tmp_path: Path) -> None:
    key = "model.norm.weight"
    folder = edit(
        tiny.save("llama", tmp_path), lambda tensors: tensors.update({key: torch.zeros(64, dtype=torch.int8)})
    )
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as torch\.int8"):
        load(find(folder))


def test_missing_shards_are_named(tmp_path: Path) -> None:
    source = find(tiny.save("llama", tmp_path, shard_size="60KB"))
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[0].unlink()
    with pytest.raises(ModelError, match=f"lacks 1 of {len(shards)} shards .first: {shards[0].name}.; download"):
        open_checkpoint(source)


def test_an_index_that_names_more_than_there_is(tmp_path: Path) -> None:
    source = find(tiny.save("llama", tmp_path, shard_size="60KB"))
    index = tmp_path / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["model.ghost"] = next(iter(data["weight_map"].values()))
    index.write_text(json.dumps(data))
    with pytest.raises(ModelError, match=r"names 1 tensors that no shard holds .first: model\.ghost"):
        open_checkpoint(source)
    data["weight_map"]["model.ghost"] = "../../etc/passwd.safetensors"
    index.write_text(json.dumps(data))
    with pytest.raises(ModelError, match=r"not a plain \.safetensors file name"):
        open_checkpoint(source)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    source = find(tiny.save("llama", tmp_path))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated: \d+ bytes, but its tensors need \d+"):
        open_checkpoint(source)


def test_a_dtype_that_is_not_known_is_named(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="tensor 'x' has dtype 'F4', which is not known"):
        open_checkpoint(find(tmp_path))


def write_raw(folder: Path, header: bytes, data: bytes) -> Path:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    (folder / "config.json").write_text("{}")
    return folder


LAYOUTS = {
    "overlap": ([(0, 4), (2, 6)], 6, "'t1' overlaps the tensor before it"),
    "same bytes": ([(0, 4), (0, 4)], 4, "'t1' overlaps the tensor before it"),
    "hole": ([(0, 4), (6, 10)], 10, "'t1' follows 2 stray bytes"),
    "hole in front": ([(2, 6)], 6, "'t0' follows 2 stray bytes"),
    "trailing": ([(0, 4)], 5000, "4996 bytes follow the last tensor"),
    "only trailing": ([], 3, "3 bytes follow"),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_bytes_of_two_tensors_or_of_none_are_refused(kind: str, tmp_path: Path) -> None:
    places, size, sentence = LAYOUTS[kind]
    header = {
        f"t{index}": {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
        for index, (start, end) in enumerate(places)
    }
    with pytest.raises(ModelError, match=sentence):
        open_checkpoint(find(write_raw(tmp_path, json.dumps(header).encode(), bytes(size))))


def test_tensors_without_elements_may_lie_anywhere_between(tmp_path: Path) -> None:
    save_file({"a": torch.ones(0, 3), "b": torch.ones(2), "c": torch.ones(3, 0)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert set(open_checkpoint(find(tmp_path)).keys()) == {"a", "b", "c"}


@pytest.mark.parametrize("megabytes", [8, 15, 40])
def test_a_header_that_would_take_seconds_is_refused_at_once(megabytes: int, tmp_path: Path) -> None:
    """All within the format's own limit of 100 MB, and each of its tensors would do."""
    count = (megabytes << 20) // 60
    header = ",".join(f'"t{index:07}":{{"dtype":"U8","shape":[],"data_offsets":[0,1]}}' for index in range(count))
    folder = write_raw(tmp_path, b"{%b}" % header.encode(), b"\0")
    begun = time.process_time()
    with pytest.raises(ModelError):
        open_checkpoint(find(folder))
    assert time.process_time() - begun < 1.5


def test_damaged_headers_are_refused_and_never_crash(tmp_path: Path) -> None:
    """Mutations of a header: an error, or tensors that can be read."""
    save_file(
        {"a": torch.arange(6, dtype=torch.int64).view(2, 3), "b": torch.ones(4, dtype=torch.float16)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text("{}")
    source, file = find(tmp_path), tmp_path / "model.safetensors"
    whole, chance, refused = file.read_bytes(), random.Random(5), 0
    head = 8 + struct.unpack("<Q", whole[:8])[0]
    snippets = [b"-1", b"9" * 30, b"[" * 5000, b"null", b"1e400", b'"', b"}", b"NaN", b"18446744073709551615", b"\xff"]
    for _ in range(600):
        at = chance.randrange(head)
        change = chance.choice([bytes([chance.randrange(256)]), *snippets])
        file.write_bytes(whole[:at] + change + whole[at + chance.choice([1, len(change)]) :])
        try:
            checkpoint = open_checkpoint(source)
            for key in checkpoint.keys():  # noqa: SIM118 - a protocol, not a mapping
                assert checkpoint.read(key).shape == checkpoint.shape(key)
        except ModelError:
            refused += 1
    assert refused > 300


# --- which files ------------------------------------------------------------------------------------------------------


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    for name in ("no/such/folder", "./nothing", str(tmp_path / "gone"), "nothing"):
        with pytest.raises(ModelError, match="there is no folder or file"):
            find_model(ModelConfig(model=name))
    with pytest.raises(ModelError, match=r"neither config\.json nor a \.gguf"):
        find(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds no weights .*--load-format dummy"):
        find(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickled weights can run code and are never loaded"):
        find(tmp_path)
    assert find(tmp_path, load_format="dummy").config == {}
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"holds 2 \.gguf files"):
        find(tmp_path, load_format="gguf")
    with pytest.raises(ModelError, match=r"not a \.gguf"):
        find(tmp_path / "config.json")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": ' + "[" * 100_000, "\xff"])
def test_a_damaged_config_is_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        find(tmp_path, load_format="dummy")


def test_code_in_a_models_folder_is_never_imported(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    load(find(tmp_path))


def test_sampling_defaults_and_end_ids_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7], "temperature": 0.5}))
    source = find(tmp_path, load_format="dummy")
    assert source.eos_token_ids == (7, 9)
    assert source.generation_defaults["temperature"] == 0.5
    source = find(tmp_path, load_format="dummy", generation_config="headrace")
    assert (source.generation_defaults, source.eos_token_ids) == ({}, (7, 9))
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text(json.dumps({"top_p": 0.1}))
    assert find(tmp_path, load_format="dummy", generation_config=str(other)).generation_defaults == {"top_p": 0.1}
    with pytest.raises(ModelError, match="--generation-config is 'nowhere'"):
        find(tmp_path, load_format="dummy", generation_config="nowhere")


# --- random weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dummy_weights_follow_the_seed_and_are_usable(dtype: torch.dtype, tmp_path: Path) -> None:
    source = find(tiny.save("gpt2", tmp_path), load_format="dummy")
    first, again, other = (decoder_of(source, dtype) for _ in range(3))
    for decoder, seed in ((first, 1), (again, 1), (other, 2)):
        fill_dummy(decoder, seed)
    for name, tensor in weights(first).items():
        assert torch.equal(tensor, weights(again)[name])
        assert not torch.equal(tensor, weights(other)[name])
        norm = tensor.dim() == 1 and name.endswith("weight")
        assert abs(tensor.float().mean() - float(norm)) < 0.02
        assert 0.015 < tensor.float().std() < 0.03
    matrices = [tensor.flatten()[:64] for tensor in weights(first).values() if tensor.dim() > 1]
    assert not any(torch.equal(a, b) for i, a in enumerate(matrices) for b in matrices[:i])
