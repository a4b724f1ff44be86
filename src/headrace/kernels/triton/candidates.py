"""The GPU's candidates, best first, for the registry.

What lives here: the ordered lists, and what declines a call site before a kernel module is imported. What may not: kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from headrace.builders import Builders
from headrace.kernels.around import MOST_ROWS
from headrace.kernels.candidate import Candidate, Declined, Site, Sizes, plainly_empty

TRITON = "triton"
CASCADE = "cascade"  # paged attention that reads shared prefixes once
DEVICES = ("cuda",)
MIN_CAPABILITY = (8, 0)  # bf16 matrix instructions, asynchronous copies
MAX_HEAD_DIM = 256
SMALL_WEIGHT = 2**20  # elements; launching takes longer than reading fewer
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32,)
FLAT, FUSED = "flat", "fused"  # candidates for few rows

Accept = Callable[[Site], Callable[..., Any] | Declined]


@cache
def missing(device: torch.device) -> str | None:
    """Why no Triton kernel can run on ``device``; None if one can."""
    if find_spec("triton") is None:
        return "triton is not installed (it comes with torch for CUDA)"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return "compute capability {}.{} is below {}.{}".format(*capability, *MIN_CAPABILITY)
    return None


def can_chain(site: Site) -> bool:
    """Whether kernels of this call site may be launched while the one before still runs. Where bits count, one kernel serves all batches."""
    return site.programmatic and not site.batch_invariant and torch.cuda.get_device_capability(site.device) >= (9, 0)


def _kernel(
    module: str, name: str, accept: Accept | None = None, dtypes: tuple[torch.dtype, ...] = DTYPES, *, chained: int = 0, takes: bool = False
) -> Accept:
    """``name`` of a file here, for call sites of a known element type that ``accept`` does not decline.

    A name that starts with ``create_`` makes the callable from the site; any other is the callable. ``chained``: for so many rows it can
    be launched while the kernel before still runs. ``takes``: it is told where results get their memory.
    """

    def create(site: Site) -> Callable[..., Any] | Declined:
        if site.facts.get("dtype") not in dtypes:
            return Declined(f"element type {site.facts.get('dtype')} is none of {', '.join(str(each).removeprefix('torch.') for each in dtypes)}")
        if (reason := missing(site.device)) is not None:
            return Declined(reason)
        declined = None if accept is None else accept(site)
        if isinstance(declined, Declined):
            return declined
        found = getattr(import_module(f"headrace.kernels.triton.{module}"), name)
        if takes and site.empty is not plainly_empty:
            found = partial(found, empty=site.empty)
        if chained and can_chain(site):
            return partial(_chained, found, chained)
        made: Callable[..., Any] = found(site) if name.startswith("create_") else found
        return made

    return create


def _chained(found: Callable[..., Any], most: int, first: torch.Tensor, *rest: Any) -> Any:
    """Few rows are a chain of short kernels. Norms and rotations of more stand between products of torch's, beside which kernels let in early
    are in the way: 8 and 3 % of a step of 256 and 128 rows of an 8B model, on an H200. What stands before a step's layers and behind its head
    is short whatever the rows, so it has no such bound.
    """
    return found(first, *rest, programmatic=len(first) <= most)


def _heads(site: Site) -> Any:
    head_dim, heads, kv_heads = (site.facts.get(name) for name in ("head_dim", "num_heads", "num_kv_heads"))
    if head_dim is None or heads is None or kv_heads is None:
        return Declined("the call site does not state head_dim, num_heads and num_kv_heads")
    if head_dim > MAX_HEAD_DIM:
        return Declined(f"head_dim {head_dim} is above {MAX_HEAD_DIM}")
    if heads % kv_heads or heads // kv_heads > 64:
        return Declined(f"{heads} heads over {kv_heads} KV heads are no group of 1 to 64")
    return None


def _linear(site: Site) -> Callable[..., Any] | Declined:
    if not site.batch_invariant:
        return Declined("torch's own product (cuBLAS) is quicker where bits may depend on the batch", by_choice=True)
    return _kernel("linear", "create_linear")(site)


def _few_rows(site: Site) -> Any:
    """What the kernels for few rows do not serve."""
    outs, ins = site.facts.get("out_features"), site.facts.get("in_features")
    if outs is None or ins is None:
        return Declined("the call site does not state in_features and out_features")
    if torch.cuda.get_device_capability(site.device)[0] != 9:
        return Declined("measured on compute capability 9 alone")
    if ins % 64 or outs * ins < SMALL_WEIGHT:
        return Declined(f"{ins} to {outs} is no large weight with rows that the copy engine can read")
    return None


def _flat(site: Site) -> Callable[..., Any] | Declined:
    if site.facts.get("fused"):
        return Declined("few rows of this layer go through fused_linear", by_choice=True)
    made = _kernel("flat_linear", "create_linear", _few_rows, (torch.bfloat16, torch.float16))(site)
    return Declined(made.reason, by_choice=True) if isinstance(made, Declined) else made  # torch's own product serves it


def _fused(site: Site) -> Callable[..., Any] | Declined:
    return _kernel("flat_linear", "create_fused", _few_rows, (torch.bfloat16,))(site)  # what is not yet normed may overflow float16


def _cascade(site: Site) -> Callable[..., Any] | Declined:
    if site.facts.get("dtype") is torch.float32:
        return Declined("products of float32 gain nothing from more rows", by_choice=True)
    made = _kernel("attention", "create_cascade_attention", _heads)(site)
    return Declined(made.reason, by_choice=True) if isinstance(made, Declined) else made  # what stands behind it says so itself


def _experts(site: Site) -> Any:
    num_experts, top_k = site.facts.get("num_experts"), site.facts.get("top_k")
    if num_experts is None or top_k is None:
        return Declined("the call site does not state num_experts and top_k")
    if num_experts > 1024 or top_k > 64:
        return Declined(f"{top_k} of {num_experts} experts are more than 64 of 1024")
    return None


def prepare_compiler() -> tuple[str, str | None]:
    """What every compilation needs once, without looking at a device; importing the compiler is part of it.

    Returns the folder in which compiled kernels are kept, and if it is not the one Triton was told to use or nothing can be compiled, why.
    """
    from headrace.kernels.triton import toolchain

    folder, problem = toolchain.cache_folder()
    return folder, toolchain.prepare_compiler() or problem


def prepare_kernels(device: torch.device) -> None:
    """What must be there before kernels are compiled in several threads: all of them are imported."""
    from headrace.kernels.triton import toolchain

    toolchain.prepare_kernels(device)


@contextmanager
def built_by(builders: Builders | None) -> Iterator[None]:
    """What this thread compiles within, they compile for it."""
    from headrace.kernels.triton.launch import BUILDERS

    before = BUILDERS.set(builders)
    try:
        yield
    finally:
        BUILDERS.reset(before)


def _failure(error: Exception) -> str | None:
    from headrace.kernels.triton.toolchain import build_failure

    return build_failure(error)


def _candidate(create: Accept, rehearse: str | None, name: str = TRITON, *, batch_invariant: bool = True) -> tuple[Candidate]:
    """``rehearse``: a function of rehearsals.py, or of flat_rehearsals.py for those for few rows."""

    def rehearsed(site: Site, run: Callable[..., Any], sizes: Sizes) -> Iterable[tuple[str, Callable[[], object]]]:
        module = import_module(f"headrace.kernels.triton.{'flat_rehearsals' if name in (FLAT, FUSED) else 'rehearsals'}")
        calls: Iterable[tuple[str, Callable[[], object]]] = getattr(module, str(rehearse))(site, run, sizes)
        return calls

    return (Candidate(name, create, DEVICES, batch_invariant, failure=_failure, rehearse=rehearsed if rehearse else None),)


FLAT_LINEAR = _candidate(_flat, "flat_linears", FLAT, batch_invariant=False)
INVARIANT_LINEAR = _candidate(_linear, "linears")
FUSED_LINEAR = _candidate(_fused, "fused_linears", FUSED, batch_invariant=False)
RMS_NORM = _candidate(_kernel("norm", "rms_norm", chained=MOST_ROWS, takes=True), "norms")
LAYER_NORM = _candidate(_kernel("norm", "layer_norm", chained=MOST_ROWS, takes=True), "norms")
ROTARY_WRITE = _candidate(_kernel("rotary", "rotary_write", chained=MOST_ROWS), "rotary_writes")
ACTIVATION = _candidate(_kernel("activation", "activation", takes=True), "activations")
GATED_ACTIVATION = _candidate(_kernel("activation", "gated_activation", takes=True), "activations")
EMBEDDING = _candidate(_kernel("embedding", "embedding", chained=sys.maxsize, takes=True), "embeddings")  # one kernel for all rows
PAGED_ATTENTION = _candidate(_cascade, "attentions", CASCADE, batch_invariant=False) + _candidate(
    _kernel("attention", "create_paged_attention", _heads), "attentions"
)
MOE = _candidate(_kernel("moe", "create_moe", _experts), "experts")
GREEDY_TOKENS = _candidate(_kernel("sampling", "greedy_tokens", chained=sys.maxsize), "picks")
GUMBEL_ARGMAX = _candidate(_kernel("sampling", "gumbel_argmax"), None)  # pick_tokens does the same and more
PICK_TOKENS = _candidate(_kernel("sampling", "pick_tokens", chained=sys.maxsize), "picks")
SCORE_TOKENS = _candidate(_kernel("sampling", "score_tokens"), "picks")
WRITE_ROWS = _candidate(_kernel("rows", "write_rows", dtypes=INTEGERS), "row_writes")
GATHER_INPUTS = _candidate(_kernel("rows", "gather_inputs", dtypes=INTEGERS, chained=sys.maxsize), "gathers")
STORE_TOKENS = _candidate(_kernel("rows", "store_tokens", dtypes=INTEGERS, chained=sys.maxsize), "stores")
FETCH_STEP = _candidate(_kernel("rows", "fetch_step", dtypes=INTEGERS, chained=sys.maxsize), "fetches")
