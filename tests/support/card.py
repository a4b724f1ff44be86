"""Tests on the card: what every one of them needs, and the CPU engine as the judge of what the card answered.

What lives here: the skip, the keywords of a small strict engine, the judge, comparing a kernel with its twin.
What may not: tests, ways to run an engine (modes.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.kernels import Kernels
from headrace.request import RequestOutput
from tests.support import modes
from tests.support.kernel_cases import called, using

NUDGE = 1e-4  # two tokens this close, in logits, are a tie: rounding may decide between them
MAX_NUDGES = 4  # an answer that needs more of them is another answer

# A small engine on the card that never falls back to a twin. Sizes say how many graphs there are: 1, 2, 4, 8, 16.
STRICT: Mapping[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "strict_kernels": True,
    "max_num_seqs": 16,
    "num_blocks": 256,
    "threads": 2,
}


def require_card() -> None:
    """Skips the module where there is no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU", allow_module_level=True)


def params(**fields: Any) -> SamplingParams:
    """Greedy, 24 tokens, whatever they are, unless said otherwise."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **fields})


class Judge:
    """Each request alone, in float32, on the CPU's torch twins.

    Where two tokens are within rounding of each other the card may take the other one. So a token that differs is given
    a bias of NUDGE and the CPU asked again: if it then says the same, and goes on the same, the answer is right.
    ``nudges`` counts how often.
    """

    def __init__(self, model: str | None = None, *, tolerance: float = 2e-4, **keywords: Any) -> None:
        sizes = {
            "dtype": "float32",
            "device": "cpu",
            "threads": 2,
            "max_num_seqs": 4,
            "num_blocks": 256,
            "max_num_batched_tokens": 512,
        }
        self._llm = LLM(
            model,
            **{**sizes, "disabled_kernels": modes.NATIVE, "enable_prefix_caching": False, "overlap": 0, **keywords},
        )
        self._tolerance = tolerance
        self._known: dict[tuple[tuple[int, ...], str], RequestOutput] = {}
        self.tokens = self.nudges = 0
        self.vocab_size = self._llm.info.vocab_size

    def close(self) -> None:
        """Ties are rare. A kernel that makes them frequent is wrong."""
        self._llm.shutdown()
        assert self.nudges <= 2 + self.tokens // 1000, f"{self.nudges} near ties in {self.tokens} tokens"

    def answer(self, prompt: Sequence[int], asked: SamplingParams) -> RequestOutput:
        key = (tuple(prompt), repr(asked))
        if key not in self._known:
            self._known[key] = self._llm.generate({"prompt_token_ids": list(prompt)}, asked, use_tqdm=False)[0]
        return self._known[key]

    def check(
        self, prompt: Sequence[int], asked: SamplingParams, found: RequestOutput, *, may_fail: bool = False
    ) -> None:
        self.tokens += sum(len(each.token_ids) for each in found.outputs)
        wanted = self.answer(prompt, asked)
        for _ in range(MAX_NUDGES):
            token = _first_that_differs(found, wanted)
            if token is None:
                break
            bias = dict(asked.logit_bias or {})
            bias[token] = bias.get(token, 0.0) + NUDGE
            asked = replace(asked, logit_bias=bias)
            wanted = self.answer(prompt, asked)
            self.nudges += 1
        modes.compare(found, wanted, may_fail=may_fail, tolerance=self._tolerance)


def _first_that_differs(found: RequestOutput, wanted: RequestOutput) -> int | None:
    for got, want in zip(found.outputs, wanted.outputs, strict=True):
        for one, other in zip(got.token_ids, want.token_ids, strict=False):
            if one != other:
                return one
    return None


def runner_of(llm: LLM) -> Any:
    """The ModelRunner of an engine in this process."""
    return llm.engine.core.executor._runner  # type: ignore[attr-defined]


def exhaust(*_: Any) -> Any:
    """More than any device has: what torch raises then is what a step would raise."""
    return torch.empty(2**45, device="cuda")


# --- kernels against their twins --------------------------------------------------------------------------------------

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}  # of the largest value


def chosen(op: str, *, batch_invariant: bool = False, unified_maximum: bool = False, **facts: Any) -> Any:
    in_use = using(batch_invariant=batch_invariant, unified_maximum=unified_maximum, fused_rope_attention=False)
    kernels = Kernels(torch.device("cuda"), strict=True, techniques=in_use)
    kernel = kernels.choose(*called(op, **facts))
    assert kernels.choices[-1].chosen in ("triton", "cascade")
    return kernel


def check(got: torch.Tensor, want: torch.Tensor, *, factor: float = 1.0) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    assert bool(got.isfinite().all())
    worst = float((got.float() - want.float()).abs().max())
    assert worst <= factor * TOLERANCE[got.dtype] * max(1.0, float(want.float().abs().max())), worst
