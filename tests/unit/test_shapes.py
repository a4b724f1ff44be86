"""Which dimensions are suspected, and what each is compared with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.cost.shapes import Heads, Product, Suspect, Target, suspects, wave_use
from headrace.spec import LayerSpec, MoESpec
from tests.support.specs import LLAMA_8B

H200 = Target("cuda", 132, 16, 2048)
CPU = Target("cpu", 2, 4, 256)


def found(target: Target = H200, **changes: object) -> list[Suspect]:
    return list(suspects(replace(LLAMA_8B, **changes), target))  # type: ignore[arg-type]


def test_a_shape_that_fits_is_not_suspected() -> None:
    assert found() == found(CPU) == []


@pytest.mark.parametrize("target", [H200, CPU])
def test_a_vocabulary_between_two_multiples_is_compared_with_the_next(target: Target) -> None:
    """GPT-2's, which padding to 50,304 made famous."""
    (one,) = found(target, vocab_size=50257)
    assert one.dimension == "vocabulary 50257 (LM head 4096 → 50257)" and "50304 rows" in one.remedy
    assert (one.work, one.better) == (Product("LM head", 4096, 50257, 1), Product("LM head", 4096, 50304, 1))
    assert one.tokens == (target.few,) and one.ratio == pytest.approx(50304 / 50257)


def test_widths_are_compared_product_by_product() -> None:
    suspected = {each.work.name: each for each in found(CPU, intermediate_size=11000) if isinstance(each.work, Product)}
    assert suspected.keys() == {"gate and up", "down"}
    assert suspected["gate and up"].better == Product("gate and up", 4096, 2 * 11008, 32)
    assert suspected["down"].better == Product("down", 11008, 4096, 32) and suspected["down"].ratio == 11008 / 11000
    assert {each.work.name for each in found(CPU, hidden_size=4090) if isinstance(each.work, Product)} == {
        "qkv",
        "output",
        "gate and up",
        "down",
    }


def test_a_last_wave_that_is_half_empty_is_found() -> None:
    """Llama-3.2-1B's qkv: 192 tiles on 132 processors."""
    assert wave_use(2048, 3072, 132) == (192 / 132, 192 / 264)
    (one,) = found(hidden_size=2048, head_dim=64, intermediate_size=8192)
    assert (
        one.dimension.startswith("qkv width 3072")
        and "1.45 waves" in one.why
        and "73%" in one.why
        and one.tokens == (2048,)
    )
    assert isinstance(one.better, Product) and wave_use(2048, one.better.outs, 132)[1] >= 0.95
    assert found(replace(H200, many=8192), hidden_size=2048, head_dim=64, intermediate_size=8192) == [], (
        "more tokens fill it"
    )


def test_heads_are_compared_at_the_model_s_width() -> None:
    (one,) = [
        each for each in found(hidden_size=2560, head_dim=80, intermediate_size=10240) if isinstance(each.work, Heads)
    ]
    assert one.dimension == "head dim 80" and one.better == Heads(20, 5, 128, 32) and one.ratio == 1.0
    assert not [each for each in found(CPU, head_dim=96) if isinstance(each.work, Heads)]


def test_groups_that_tiles_do_not_hold_and_no_groups() -> None:
    (seven,) = [each for each in found(num_heads=28, num_kv_heads=4, hidden_size=3584) if isinstance(each.work, Heads)]
    assert seven.dimension == "GQA group 7" and seven.better == Heads(32, 4, 128, 32) and seven.ratio == 8 / 7
    (single,) = [each for each in found(CPU, num_kv_heads=32) if isinstance(each.work, Heads)]
    assert single.dimension == "GQA group 1" and single.better == Heads(32, 8, 128, 32) and single.ratio == 1.0


def test_what_cannot_be_split_is_said_without_a_measurement() -> None:
    said = {each.dimension: each for each in found(num_heads=28, num_kv_heads=4, hidden_size=3584) if each.work is None}
    assert "8 devices" in said["28 heads over 4"].why
    copied = next(each for each in found(num_kv_heads=2, intermediate_size=14336) if "KV heads" in each.dimension)
    assert "2× on 4, 4× on 8" in copied.why and copied.better is None
    (parts,) = [
        each for each in found(intermediate_size=11008) if isinstance(each.work, Product) and "split" in each.why
    ]
    assert parts.work == Product("gate and up", 4096, 2 * 11008 // 8, 32) and parts.better == Product(
        "gate and up", 4096, 2 * 1408, 32
    )


def test_sparse_layers_have_no_dense_feed_forward() -> None:
    sparse = (LayerSpec(moe=MoESpec(8, 2, 512, True)),) * 4
    assert not [each for each in found(CPU, layers=sparse, intermediate_size=1001) if each.work]
