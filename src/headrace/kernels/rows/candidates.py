"""The candidates for what stands between the host, rows and a step, and for the embedding.

What lives here: the ordered lists, and small calls that build each kernel a model will launch. What may not: kernels.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from headrace.kernels.build.gpu import triton
from headrace.kernels.build.warm_ups import TOKENS
from headrace.kernels.candidate import INTEGERS, Calls, CallSite, Facts, Sizes


def _writes(site: CallSite[Facts], run: Any, sizes: Sizes) -> Calls:
    def write() -> object:
        rows, at = site.zeros(TOKENS, sizes.max_model_len), site.zeros(TOKENS)
        return run(rows, at, at.long(), site.zeros(TOKENS + 1), 1)

    yield "new rows", write


def _gathers(site: CallSite[Facts], run: Any, sizes: Sizes) -> Calls:
    def gather() -> object:
        tokens, at = site.zeros(TOKENS, sizes.max_model_len), site.zeros(TOKENS)
        width = -(-sizes.max_model_len // sizes.block_size)
        return run(tokens, site.zeros(TOKENS, width), at, at.clone(), at.clone(), at.clone(), sizes.block_size, width)

    yield "step", gather


def _stores(site: CallSite[Facts], run: Any, sizes: Sizes) -> Calls:
    def store() -> object:
        at = site.zeros(TOKENS)
        return run(site.zeros(TOKENS, sizes.max_model_len), at, at.clone(), at.long(), at.float())

    yield "step", store


def _fetches(site: CallSite[Facts], run: Any, sizes: Sizes) -> Calls:
    yield "step", lambda: run(site.zeros(2, 7, TOKENS), site.zeros(1), site.zeros(3, TOKENS), site.zeros(2, 2))


def _embeddings(site: CallSite[Facts], run: Any, sizes: Sizes) -> Calls:
    spec = sizes.spec

    def look_up(scale: float | None) -> object:
        return run(site.zeros(TOKENS, dtype=torch.int64), site.zeros(1, spec.hidden_size), scale)

    yield "tokens", partial(look_up, spec.embedding_scale)
    if spec.rope is None:
        yield "positions", partial(look_up, None)


WRITE_ROWS = (triton("rows.triton_rows:write_rows", _writes, dtypes=INTEGERS),)
GATHER_INPUTS = (triton("rows.triton_rows:gather_inputs", _gathers, dtypes=INTEGERS, chained=sys.maxsize),)
STORE_TOKENS = (triton("rows.triton_rows:store_tokens", _stores, dtypes=INTEGERS, chained=sys.maxsize),)
FETCH_STEP = (triton("rows.triton_rows:fetch_step", _fetches, dtypes=INTEGERS, chained=sys.maxsize),)
# one kernel for all rows
EMBEDDING = (triton("rows.triton_embedding:embedding", _embeddings, chained=sys.maxsize, takes=True),)
