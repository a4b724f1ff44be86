"""A core on virtual time over a modelled device that is disturbed as a real one is, with a recorder that learns how
fast it goes.

What lives here: that machine. What may not: loads, assertions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.clock import VirtualClock
from headrace.config import CacheConfig, SchedulerConfig
from headrace.cost.calibrated import SHARES, Steadiness
from headrace.cost.cost_model import CostModel
from headrace.cost.prices import Slowness, StepPrices
from headrace.cost.profile import DeviceIdentity, DeviceProfile
from headrace.engine.core import EngineCore
from headrace.engine.keyed_hash import keyed_hash_info
from headrace.observe.metrics import StepRecorder
from headrace.planner.devices import classes_of
from headrace.planner.drafts import Drafting
from headrace.planner.executor import ModelledExecutor
from headrace.planner.steadiness import Disturbances
from headrace.planner.step_time import StepTime
from headrace.spec import DecoderSpec, LayerSpec, RopeSpec, kv_groups
from headrace.speculative.settings import read_settings
from tests.support.hash_engine import create_core

SPEC = DecoderSpec(
    "llama", 600, 128, 4, 2, 32, 256, (LayerSpec(),) * 3, 4096, RopeSpec(1e4, 32), checkpoint_dtype="bfloat16"
)
PROFILE = DeviceProfile(
    identity=DeviceIdentity(kind="cpu", name="a machine", threads=0),
    read_bandwidth=1e9,
    copy_bandwidth=1e9,
    gemm_rates={"bfloat16": 1e10},
)
SLOW = Slowness(1.5, 1.3)
PRICES = StepPrices(
    (SLOW, SLOW), SLOW, (SLOW, SLOW), Slowness(0.0, 1.8), 1.0, 1.0, classes_of("cpu"), (1e-3, 1e-3), 1e-5
)
STEADINESS = Steadiness(
    tuple(0.9 + 0.3 * share for share in SHARES), tuple(0.9 + 0.3 * share for share in SHARES), 0.5, 0.2
)


def machine(
    depth: int,
    *,
    max_num_seqs: int = 8,
    num_blocks: int = 4000,
    cache: CacheConfig | None = None,
    steadiness: Steadiness = STEADINESS,
    **fields: Any,
) -> tuple[EngineCore, StepRecorder]:
    groups = kv_groups(SPEC, 16, 2)
    costs, clock = CostModel(SPEC, groups, PROFILE, weight_bytes=2, dtype="bfloat16"), VirtualClock()
    info = keyed_hash_info(
        vocab_size=600, num_blocks=num_blocks, block_size=16, max_num_seqs=max_num_seqs, max_model_len=4096
    )
    config = SchedulerConfig(max_num_seqs=max_num_seqs, **{"max_num_batched_tokens": 512, **fields})
    settings = read_settings(config.speculative_config)
    info = info if settings is None else replace(info, max_drafts=settings.most)
    drafting = None if settings is None else Drafting(settings.expected)
    ratio = Disturbances(steadiness, 1).ratio
    executor = ModelledExecutor(info, StepTime(costs, PRICES).of_plan, clock, ratio=ratio, drafting=drafting)
    recorder = StepRecorder(costs, promise=config.max_step_seconds)
    core = create_core(
        executor,
        config,
        clock,
        cache=cache or CacheConfig(block_size=16),
        depth=depth,
        observer=recorder,
        forecast=recorder.floors,
        speed=recorder.speed,
        ends={7},
    )
    return core, recorder
