"""Quantised checkpoints compute what their weights mean: tokens and logits are those of the same weights, dequantised
and run as they are."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.config import ModelConfig
from headrace.errors import ModelError
from headrace.kernels import Kernels
from headrace.kernels.candidate import Candidate
from headrace.kernels.operations import ACTIVATED_LINEAR, DECODE_STEP, NORMED_LINEAR, OPERATIONS, PACKED_LINEAR
from headrace.kernels.step.reference import decode_step
from headrace.layers.packed import Piece
from headrace.models.decoder import Decoder
from headrace.models.families import spec_from_config
from headrace.models.gguf_file import read_gguf
from headrace.models.loader import fill_dummy
from headrace.models.source import find_model
from headrace.quant.gguf import BLOCKS, GGUFBlocks
from headrace.sites import count_bytes, weights
from headrace.worker.memory import weight_bytes
from tests.support import quantised, tiny
from tests.support.forward import CPU, PagedRun, load_decoder
from tests.support.gguf_files import write_gguf
from tests.support.kernel_cases import using

PROMPTS = [[1 + (7 * row + at) % 250 for at in range(5 + 9 * row)] for row in range(3)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """The quantised checkpoint and the plain one that it stands for, written once."""
    return functools.cache(lambda name: quantised.write(name, tmp_path_factory.mktemp(name)))


@pytest.fixture
def written(both: Callable[[str], tuple[Path, Path]]) -> Callable[[str], Path]:
    return lambda name: both(name)[0]


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    return computed(load_decoder(folder, dtype=dtype))


def computed(decoder: Decoder) -> Tensor:
    run = PagedRun(decoder)
    return torch.cat(list(run.step({str(index): prompt for index, prompt in enumerate(PROMPTS)}).values()))


def oracle(folder: Path, recipe: quantised.Recipe) -> Tensor:
    """The plain weights; where a format rounds inputs, too, transformers' model does so before each of its matrices."""
    if recipe.inputs is None:
        return logits(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and quantised.is_quantised(recipe, f"{name}.weight"):
            module.register_forward_pre_hook(lambda _, args, inputs=recipe.inputs: (inputs(args[0]),))
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])


def test_norms_and_gates_inside_of_products_change_nothing(
    both: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what runs on a GPU alone, the way through the layers: by the twins, and to the bit."""
    folder, twins, calls = both("compressed-fp8")[0], frozenset({"native", "onednn"}), []
    plain = computed(load_decoder(folder, kernels=Kernels(CPU, disabled=twins)))

    def counted(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*weights: Any) -> Callable[..., Any]:
            product = make(*weights)
            return lambda *inputs: (calls.append(make), product(*inputs))[1]

        return made

    ours = {
        each.name: dataclasses.replace(each, candidates=(Candidate("own", lambda site, each=each: counted(each.twin)),))
        for each in (NORMED_LINEAR, ACTIVATED_LINEAR)
    }
    monkeypatch.setattr("headrace.kernels.OPERATIONS", {**OPERATIONS, **ours})
    decoder = load_decoder(folder, kernels=Kernels(CPU, disabled=twins))
    assert torch.equal(computed(decoder), plain)
    layers = decoder.spec.num_layers
    assert (calls.count(NORMED_LINEAR.twin), calls.count(ACTIVATED_LINEAR.twin)) == (2 * layers, layers)


def test_whole_steps_read_the_layers_own_weights_in_fp8(
    both: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a product has laid its parts one below another; and no step is computed whole where they are apart. The
    twin's numbers are those of the weights, no input rounded."""

    def together(pieces: list[Piece], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        joined = torch.cat([piece.tensors[0]["weight"].view(torch.uint8) for piece in pieces])
        for piece, part in zip(pieces, joined.split([piece.outs for piece in pieces]), strict=True):
            piece.tensors = ({**piece.tensors[0], "weight": part.view(torch.float8_e4m3fn)},)
        return PACKED_LINEAR.twin(pieces, bias)

    step = dataclasses.replace(
        DECODE_STEP, candidates=(Candidate("own", lambda site: site.facts.eight and decode_step),)
    )
    joins = dataclasses.replace(PACKED_LINEAR, candidates=(Candidate("own", lambda site: together),))
    folder, plain = both("compressed-fp8")
    off = Kernels(CPU, disabled=frozenset({"native", "onednn"}))
    monkeypatch.setattr("headrace.kernels.OPERATIONS", {**OPERATIONS, step.name: step})
    assert load_decoder(folder, kernels=off).megakernel_context(1, 16) == 0  # parts are apart
    monkeypatch.setattr("headrace.kernels.OPERATIONS", {**OPERATIONS, step.name: step, joins.name: joins})
    decoder = load_decoder(folder, kernels=Kernels(CPU, disabled=frozenset({"native", "onednn"})))
    assert decoder.megakernel_context(1, 16) > 0
    torch.testing.assert_close(computed(decoder), logits(plain), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", quantised.RECIPES)
def test_logits_are_those_of_the_weights_it_means(name: str, both: Callable[[str], tuple[Path, Path]]) -> None:
    """And its bytes are those that were known before anything was loaded."""
    recipe = quantised.RECIPES[name]
    folder, plain = both(name)
    decoder = load_decoder(folder)
    buffers = sum(buffer.nbytes for buffer in decoder.buffers())
    assert weight_bytes(decoder) - buffers == pytest.approx(count_bytes(decoder.spec, 4), rel=0.02)
    # a rounded input that lies between two codes may fall to either side
    atol = 1e-4 if recipe.inputs is None else 2e-2
    torch.testing.assert_close(computed(decoder), oracle(plain, recipe), rtol=1e-4, atol=atol)


def tokens(folder: Path, **options: object) -> tuple[list[list[int]], int]:
    with LLM(
        model=str(folder),
        device="cpu",
        dtype="float32",
        max_num_batched_tokens=16,
        max_num_seqs=3,
        num_blocks=64,
        **options,
    ) as llm:
        answers = llm.generate(
            [{"prompt_token_ids": each} for each in PROMPTS],
            SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        )
        return [list(answer.outputs[0].token_ids) for answer in answers], llm.engine.core.executor.info.memory[
            "weights"
        ]


@pytest.mark.parametrize("name", ["compressed-ignore", "gptq-act-order", "nf4-nested"])
def test_an_engine_gives_the_tokens_of_the_weights_dequantised(
    name: str, both: Callable[[str], tuple[Path, Path]]
) -> None:
    """Held packed, widened while they are read, and stored wide: in chunks and batches, one and the same."""
    folder, plain = both(name)
    (packed, held), (widened, wide), (want, whole) = tokens(folder), tokens(folder, quantization="none"), tokens(plain)
    assert packed == widened == want
    assert held < 0.75 * wide and wide == whole


@pytest.mark.parametrize(
    ("name", "model"), [("fp8-channel", "phi3"), ("gptq-4", "qwen2"), ("compressed-w4a16", "mistral")]
)
def test_other_families(name: str, model: str, tmp_path: Path) -> None:
    """Matrices that are stored merged, and ones with biases."""
    recipe = quantised.RECIPES[name]
    folder, plain = quantised.write(name, tmp_path, model=model)
    torch.testing.assert_close(
        logits(folder), oracle(plain, recipe), rtol=1e-4, atol=1e-4 if recipe.inputs is None else 2e-2
    )


@pytest.mark.parametrize("model", ["mixtral", "qwen3-moe-mixed"])
@pytest.mark.parametrize("name", ["gptq-4", "compressed-w4a16", "compressed-nvfp4"])
def test_experts_are_held_in_formats_too(name: str, model: str, tmp_path: Path) -> None:
    folder, plain = quantised.write(name, tmp_path, model=model)
    torch.testing.assert_close(logits(folder), logits(plain), rtol=1e-4, atol=1e-4)


def test_bfloat16_is_rounded_once(both: Callable[[str], tuple[Path, Path]]) -> None:
    """What the weights mean is multiplied in the type the model computes in, where inputs are not rounded further."""
    folder, plain = both("gptq-4")
    kernels = Kernels(CPU, techniques=using(integer_products=False))
    got = computed(load_decoder(folder, dtype=torch.bfloat16, kernels=kernels)).float()
    torch.testing.assert_close(got, logits(plain, torch.bfloat16).float(), rtol=0.05, atol=0.15)


@pytest.mark.parametrize("name", ["gptq-4", "compressed-nvfp4"])
def test_inputs_in_8_bits_cost_little(name: str, both: Callable[[str], tuple[Path, Path]]) -> None:
    """Where products are of whole numbers: far less than a weight's 4 bits have cost."""
    folder, plain = both(name)
    want = logits(plain)
    error = (logits(folder, torch.bfloat16).float() - want).square().mean().sqrt() / want.std()
    assert 0.001 < error < 0.05


# --- GGUF -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_mean_what_the_gguf_library_says(kind: str) -> None:
    """Random bytes, with scales that are numbers; whole matrices, parts, and single rows in any order."""
    random, (elements, size, scales) = np.random.default_rng(0), BLOCKS[kind]
    assert GGML_QUANT_SIZES[GGMLQuantizationType[kind]] == (elements, size)
    data = random.integers(0, 256, (64, 2 * size), dtype=np.uint8)
    blocks = data.reshape(-1, size)
    for at in scales:
        blocks[:, at : at + 2] = random.normal(size=len(blocks)).astype("<f2").view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":
        blocks[:, 0] = random.integers(100, 140, len(blocks))
    want = torch.from_numpy(dequantize(data, GGMLQuantizationType[kind]))
    form, tensors = GGUFBlocks(kind), {"weight": torch.from_numpy(data)}
    assert form.num_bytes(64, 2 * elements, 2) == data.nbytes
    held = form.prepare(tensors)
    for rows in (slice(0, 64), slice(32, 64), torch.tensor([5, 0, 63, 5])):
        assert torch.equal(form.dense(held, rows, torch.float32), want[rows])


def mixed_gguf(folder: Path, target: Path) -> Path:
    """Types that differ from matrix to matrix, as K-quants' mixtures do: the first layer's, value's and the
    embedding's are finer."""

    def kind_of(name: str) -> GGMLQuantizationType:
        if name.startswith("blk.0.") or "attn_v" in name or "token_embd" in name:
            return GGMLQuantizationType.Q8_0
        return GGMLQuantizationType.Q4_0 if "ffn_down" in name else GGMLQuantizationType.Q5_1

    return write_gguf(folder, target, kind=kind_of)


@pytest.mark.parametrize("model", ["llama", "qwen3-moe", "gpt2"])
def test_a_gguf_mixture_stays_packed(model: str, tmp_path: Path) -> None:
    more = {"scale_attn_by_inverse_layer_idx": False} if model == "gpt2" else {}
    file = mixed_gguf(tiny.save(model, tmp_path / "folder", **more), tmp_path / "m.gguf")
    (packed, held), (want, whole) = tokens(file), tokens(file, quantization="none")
    assert packed == want and held < 0.45 * whole
    spec = spec_from_config(find_model(ModelConfig(model=str(file))).config)
    assert len({form.label for weight in weights(spec) for form in weight.formats}) == 3


def test_ranks_of_whole_experts_take_theirs_out_of_a_gguf_file(tmp_path: Path) -> None:
    file = mixed_gguf(tiny.save("qwen3-moe", tmp_path / "folder"), tmp_path / "m.gguf")
    (alone, whole), (shared, held) = (
        tokens(file, threads=1, **more) for more in ({}, {"tensor_parallel_size": 2, "enable_expert_parallel": True})
    )
    assert shared == alone and 0.5 * whole < held < 0.65 * whole  # routers and norms are whole on both


def test_scales_of_the_cache_are_no_weights(written: Callable[[str], Path], tmp_path: Path) -> None:
    folder = written("compressed-fp8")
    tensors = load_file(folder / "model.safetensors")
    more = {f"model.layers.{layer}.self_attn.{name}_scale": torch.ones(1) for layer in range(3) for name in "kv"}
    save_file(tensors | more, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert torch.equal(logits(tmp_path), logits(folder))


# --- what cannot be right ---------------------------------------------------------------------------------------------

Q = "model.layers.0.self_attn.q_proj."


def _set(suffix: str, value: float, at: int = 0) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        flat = tensors[Q + suffix].reshape(-1).clone()
        flat[at] = value
        tensors[Q + suffix] = flat.reshape(tensors[Q + suffix].shape)

    return change


def _drop(suffix: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(Q + suffix)


def _turn(suffix: str) -> Callable[[dict[str, Tensor]], None]:
    """As one that was shuffled with another: of the same elements in another shape."""
    return lambda tensors: tensors.update({Q + suffix: tensors[Q + suffix].t().reshape(-1, 4).contiguous()})


def _cast(suffix: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({Q + suffix: tensors[Q + suffix].to(dtype)})


HOSTILE: list[tuple[str, Callable[[dict[str, Tensor]], None], str]] = [
    (
        "fp8-channel",
        _set("weight_scale", float("nan")),
        r"attention\.qkv \[0\] \(FP8.*1 of 64 values of scale are no scales \(first: nan\)\. The ch",
    ),
    ("fp8-channel", _set("weight_scale", 0.0), "values of scale are no scales"),
    ("fp8-channel", _set("weight", float("nan")), "weight holds NaN"),
    ("fp8-blocks", _set("weight_scale_inv", float("inf")), "values of scale are no scales"),
    ("fp8-blocks", _drop("weight_scale_inv"), r"lacks 1 of the tensors .*q_proj\.weight_scale_inv"),
    ("fp8-tensor-static", _set("input_scale", 0.0), "values of input_scale are no scales"),
    (
        "fp8-channel",
        _cast("weight", torch.uint8),
        "is stored as torch.uint8, but its format calls for torch.float8_e4m3fn",
    ),
    ("compressed-w8a8", _set("weight_scale", float("inf"), 3), "values of scale are no scales"),
    ("compressed-w4a16", _set("weight_scale", 0.0), "values of weight_scale are no scales"),
    ("compressed-w4a16", _cast("weight_scale", torch.float64), "weight_scale is stored as torch.float64"),
    ("compressed-w4a16", _turn("weight_packed"), "weight_packed has shape .*, but the config calls for"),
    (
        "compressed-w4a16",
        _set("weight_shape", 63),
        r"weight_shape says \[63, 64\], and weight_packed has 64 rows of 8 words",
    ),
    ("compressed-w4a8", _set("weight_scale", float("nan")), "values of weight_scale are no scales"),
    ("compressed-w4a8", _turn("weight_packed"), "weight_packed has shape .*, but the config calls for"),
    ("compressed-w4a8", _drop("weight_scale"), r"lacks 1 of the tensors .*q_proj\.weight_scale"),
    ("compressed-w6a8", _set("weight_scale", float("-inf")), "values of weight_scale are no scales"),
    ("compressed-nvfp4", _set("weight_global_scale", 0.0), "values of whole are no scales"),
    ("compressed-mxfp4", _set("weight_scale", 255), "scale holds NaN"),
    ("gptq-4", _set("scales", float("nan")), "values of scales are no scales"),
    ("gptq-4", _drop("qzeros"), r"lacks 1 of the tensors .*q_proj\.qzeros"),
    ("gptq-4", _turn("scales"), "scales has shape"),
    ("gptq-act-order", _set("g_idx", 2), r"g_idx names groups from 0 to 2, and there are 2"),
    ("gptq-act-order", _drop("g_idx"), r"lacks 1 of the tensors .*q_proj\.g_idx"),
    ("awq", _set("scales", 0.0), "values of scales are no scales"),
    ("nf4", _set("weight.absmax", float("nan")), "values of absmax are no scales"),
    ("nf4", _set("weight.quant_state.bitsandbytes__nf4", 0), "quant_state is not JSON"),
    ("nf4-nested", _set("weight.nested_absmax", float("inf")), "values of nested_absmax are no scales"),
]


@pytest.mark.parametrize(("name", "change", "said"), HOSTILE)
def test_damaged_tensors_are_named_at_load(
    name: str, change: Callable[[dict[str, Tensor]], None], said: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = written(name)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ModelError, match=said):
        load_decoder(tmp_path)


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("gptq-4", {"group_size": 16}, r"qzeros has shape .*, but the config calls for \[4, 8\]|scales has shape"),
        ("gptq-4", {"bits": 8}, r"qweight has shape \[8, 64\], but the config calls for \[16, 64\]"),
        (
            "gptq-4",
            {"group_size": 48},
            r"q_proj cannot be stored as GPTQ, 4 bits, groups of 48: 64 inputs are no whole groups of 48\. Use",
        ),
        ("awq", {"group_size": -1}, "has shape"),
        ("fp8-blocks", {"weight_block_size": [16, 16]}, "weight_scale_inv has shape"),
        (
            "compressed-fp8",
            {
                "config_groups": {
                    "g": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                        "input_activations": {
                            "num_bits": 8,
                            "type": "float",
                            "dynamic": True,
                            "strategy": "group",
                            "group_size": 48,
                        },
                    }
                }
            },
            "fp8 inputs by 48: 64 inputs are no whole groups of 48, by which they are rounded",
        ),
    ],
)
def test_other_sizes_than_the_tensors_have_are_named(
    name: str, config: dict[str, object], said: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = written(name)
    whole = json.loads((folder / "config.json").read_text())
    whole["quantization_config"] |= config
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ModelError, match=said):
        load_decoder(tmp_path)


def test_a_gguf_scale_that_is_no_number_is_named(tmp_path: Path) -> None:
    file = write_gguf(tiny.save("llama", tmp_path / "folder"), tmp_path / "m.gguf", kind=GGMLQuantizationType.Q8_0)
    tensor = read_gguf(file).tensors["blk.1.attn_q.weight"]
    data = bytearray(file.read_bytes())
    data[tensor.start : tensor.start + 2] = b"\x00\x7e"  # NaN
    file.write_bytes(data)
    with pytest.raises(
        ModelError,
        match=r"layers\.1\.attention\.qkv \[0\] \(GGUF Q8_0\): 1 of 256 blocks have a scale that is NaN or infinite",
    ):
        LLM(model=str(file), device="cpu")


@pytest.mark.parametrize(
    "name", ["fp8-blocks", "compressed-w4a16", "gptq-3", "awq", "nf4-nested", "compressed-nvfp4", "compressed-mxfp4"]
)
def test_random_weights_of_a_quantised_model_are_weights(name: str, written: Callable[[str], Path]) -> None:
    config = find_model(ModelConfig(model=str(written(name)), load_format="dummy")).config
    decoder = Decoder(spec_from_config(config), kernels=Kernels(CPU), dtype=torch.float32, device=CPU, max_model_len=64)
    fill_dummy(decoder, 0)
    decoder.finish_loading()
    pieces = [module for module in decoder.modules() if isinstance(module, Piece)]
    spread = torch.cat([piece.dense(slice(None), torch.float32).flatten() for piece in pieces]).std().item()
    assert pieces and 0.002 < spread < 0.2


def test_experts_in_one_tensor_as_gpt_oss_stores_them(tmp_path: Path) -> None:
    folder, plain = quantised.write_stacked(tmp_path)
    torch.testing.assert_close(logits(folder), logits(plain), rtol=1e-4, atol=1e-4)
