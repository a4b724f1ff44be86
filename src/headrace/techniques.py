"""The register of techniques: where each comes from, how it is switched, what it should improve, how that is measured.

What lives here: one entry a technique. What may not: the techniques themselves, and any measuring.
A technique is removed by deleting its room, its config field and its entry here (a test compares the two).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.config import EngineConfig
from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """``switch`` is the path of a config field; ``off`` is the field's value when the technique is off.

    ``needs_gpu``: without one the switch does nothing, and there is nothing to measure; ``needs_cpu``: with one.
    """

    name: str
    source: str
    switch: str
    off: Any
    improves: str
    off_means: str
    needs_gpu: bool = False
    needs_cpu: bool = False
    on_value: Any = None  # where neither True nor 1 is meant
    ablation: str = ""  # the file of bench/ablations that measures it, where that has another name

    @property
    def ablate(self) -> str:
        return f"headrace bench ablate {self.name}"

    def lacks(self, device: str) -> str | None:
        """The kind of device it needs, where ``device`` ("cpu", "cuda", "cuda:0") is of another."""
        on_card = device.startswith("cuda")
        return "GPU" if self.needs_gpu and not on_card else "CPU" if self.needs_cpu and on_card else None

    @property
    def default(self) -> Any:
        """The field's default; None means that it is chosen by device."""
        folder, _, name = self.switch.partition(".")
        return getattr(getattr(EngineConfig(), folder), name)

    @property
    def on(self) -> Any:
        """The field's value when the technique is on."""
        if self.on_value is not None:
            return self.on_value
        return not self.off if isinstance(self.off, bool) else 1

    @property
    def default_state(self) -> str:
        """``on``, ``off``, ``automatic`` (chosen by device) or another value."""
        words = {self.on: "on", self.off: "off"} if isinstance(self.off, bool) else {}
        if self.default is None:
            return "automatic" if self.off is not None else "off"
        return words.get(self.default, str(self.default))

    def __str__(self) -> str:
        return self.name


TECHNIQUES = (
    Technique(
        name="kv_caching",
        source="Transformer decoding with stored keys and values (Shazeer 2019, Fast Transformer Decoding)",
        switch="cache.kv_caching",
        off=False,
        improves="tokens/s of one stream: linear instead of quadratic in the output's length",
        off_means="every token of a sequence is computed again at every step",
    ),
    Technique(
        name="continuous_batching",
        source="Orca (Yu et al., OSDI 22), section 3: iteration-level scheduling",
        switch="scheduler.continuous_batching",
        off=False,
        improves="requests/s when answers differ in length",
        off_means="a batch runs until its last sequence ends; then the next is formed",
    ),
    Technique(
        name="token_concatenation",
        source="Effective Transformer (2020); ByteTransformer (Zhai et al., IPDPS 23): the padding-free algorithm",
        switch="device.token_concatenation",
        off=False,
        improves="prefill tokens/s when prompts differ in length",
        off_means="every sequence of a step is padded to the longest",
    ),
    Technique(
        name="last_layer_pruning",
        source="the LM head only where a token is wanted, taken one layer further; no paper that we know of",
        switch="device.last_layer_pruning",
        off=False,
        improves="prefill tokens/s: of the last layer, only keys and values are needed of tokens that nobody samples from; in steps of"
        " 1,024 tokens and more (128 on a CPU) it attends for none of them either",
        off_means="the last layer computes every token of a prompt, also those that nobody reads",
    ),
    Technique(
        name="chunked_prefill",
        source="Sarathi-Serve (Agrawal et al., OSDI 24), section 4: stall-free batching",
        switch="scheduler.chunked_prefill",
        off=False,
        improves="the tail of the time between tokens while long prompts arrive",
        off_means="a prompt is computed whole, before any decoding",
    ),
    Technique(
        name="longest_first",
        source="list scheduling, longest processing time first (Graham, SIAM J. Appl. Math. 17, 1969: Bounds on multiprocessing timing anomalies)",
        switch="scheduler.longest_first",
        off=False,
        improves="time of an offline batch whose answers differ in length and all have known lengths (ignore_eos, or min_tokens = max_tokens)",
        off_means="requests of one call begin in the order given",
    ),
    Technique(
        name="step_budget",
        source="Sarathi-Serve (Agrawal et al., OSDI 24), section 4.3: steps sized by the bound on the time between tokens; here each is priced",
        switch="scheduler.max_step_ms",
        off=None,
        on_value=50.0,
        improves="requests/s at a bound on the 99th percentile of the time between tokens",
        off_means="a step is bounded by a number of tokens (max_num_batched_tokens), whatever they cost",
    ),
    Technique(
        name="paged_allocation",
        source="PagedAttention (Kwon et al., SOSP 23), section 4",
        switch="cache.paged_allocation",
        off=False,
        improves="requests that run at once in the same memory",
        off_means="a sequence's longest possible length is reserved at admission",
    ),
    Technique(
        name="prefix_caching",
        source="RadixAttention (Zheng et al., SGLang, NeurIPS 24), section 3; vLLM's automatic prefix caching",
        switch="cache.enable_prefix_caching",
        off=False,
        improves="time to first token and requests/s of conversations and shared system prompts",
        off_means="every prompt is computed from its first token",
    ),
    Technique(
        name="overlap",
        source="asynchronous scheduling: NanoFlow (Zhu et al., OSDI 25); SGLang v0.4's zero-overhead batch scheduler",
        switch="device.overlap",
        off=0,
        improves="steps/s: the next step is scheduled while the last one runs",
        off_means="a step is scheduled after the last one's tokens are known",
    ),
    Technique(
        name="cuda_graphs",
        source="Nimble (Kwon et al., NeurIPS 20): task scheduling ahead of time; Accelerating PyTorch with CUDA Graphs (PyTorch blog, 2021)",
        switch="device.enforce_eager",
        off=True,
        improves="time a decode step of small batches on a GPU",
        off_means="the host launches every kernel of every step",
        needs_gpu=True,
        ablation="decode_steps",
    ),
    Technique(
        name="compressed_weights",
        source="lossless formats for bfloat16: DFloat11 (Zhang et al. 2025), NeuZip (Hao et al. 2024); here of fixed length, 12 bits",
        switch="device.compressed_weights",
        off=False,
        improves="on a CPU with AVX-512 BF16, time a decode step of up to 8 requests, which reads a quarter less; and memory",
        off_means="weights are held as they come, or packed by oneDNN",
        needs_cpu=True,
    ),
    Technique(
        name="flat_gemm",
        source="FlashDecoding++ (Hong et al., MLSys 24), section 4: flat GEMM and its decision table; DeepSpeed Inference (SC 22): SBI-GeMM",
        switch="device.flat_gemm",
        off=False,
        improves="time a decode step of up to 64 requests: products of few rows are bound by reading weights",
        off_means="the vendor's products, whatever the shape; norms, sums and activations are kernels of their own",
        needs_gpu=True,
        ablation="decode_steps",
    ),
    Technique(
        name="tuned_products",
        source="measured choice among a library's algorithms: ATLAS (Whaley and Dongarra, SC 98); the residual as the product's C (BLAS' beta)",
        switch="device.tuned_products",
        off=False,
        improves="time a decode step of 65 to 512 requests; prompt tokens/s in steps of 4,096 tokens and more, which are bound by the card's power",
        off_means="cuBLAS' first proposal computes them, and the norm behind long products adds the residual",
        needs_gpu=True,
        ablation="every_step",
    ),
    Technique(
        name="gated_products",
        source="epilogue fusion: CUTLASS's dual GEMM with SiLU; warp specialisation and ping-pong tiles on Hopper "
        "(CUTLASS 3; FlashAttention-3, Shah et al. 2024)",
        switch="device.gated_products",
        off=False,
        improves="time a decode step of 65 to 512 requests, and of prompts: gate, up and activation in one launch, in tiles that fill the device, "
        "for long prompts in tall ones that bring fewer bytes",
        off_means="gate and up are the vendor's product, the activation is a kernel of its own",
        needs_gpu=True,
        ablation="every_step",
    ),
    Technique(
        name="cuda_prefill",
        source="FlashAttention-3 (Shah et al. 2024); FlashDecoding++ (Hong et al., MLSys 24), section 3, for powers without a running maximum",
        switch="device.cuda_prefill",
        off=False,
        improves="time of prompts: their attention at 1.3 to 1.4 times the rate, for heads of 64 and 128 on Hopper",
        off_means="attention to prompts is Triton's kernel",
        needs_gpu=True,
        ablation="last_layer_pruning",
    ),
    Technique(
        name="deep_fusion",
        source="DeepSpeed Inference (Aminabadi et al., SC 22), section III: Deep-Fusion; TurboTransformers (Fang et al., PPoPP 21)",
        switch="device.deep_fusion",
        off=False,
        improves="time a decode step of up to 64 requests: five launches a layer (six without fused_rope_attention) in place of nine or ten",
        off_means="norms, residual sums and activations are kernels of their own",
        needs_gpu=True,
        ablation="decode_steps",
    ),
    Technique(
        name="early_weights",
        source="programmatic dependent launch and thread block clusters (CUDA C++ Programming Guide); No Bubbles (Hazy Research, 2025)",
        switch="device.early_weights",
        off=False,
        improves="time a decode step of 9 to 64 rows of measured shapes, on Hopper: a product's weights are under way while the kernel before runs",
        off_means="such products are Triton's, whose weights are asked for once the kernel before has ended",
        needs_gpu=True,
        ablation="decode_steps",
    ),
    Technique(
        name="persistent_decode",
        source="Look Ma, No Bubbles (Hazy Research, 2025): a megakernel for Llama-1B; Mirage Persistent Kernel (Cheng et al. 2025)",
        switch="device.persistent_decode",
        off=False,
        improves="time a decode step of up to 8 requests: one launch computes all layers, and weights never stop coming between operators",
        off_means="each layer is five launches, each with a beginning and an end in which the memory waits",
        needs_gpu=True,
        ablation="decode_steps",
    ),
    Technique(
        name="fused_rope_attention",
        source="FlashInfer (Ye et al., MLSys 25): attention with rotary embedding inside; flash decoding (Dao et al. 2023); "
        "programmatic dependent launch (CUDA C++ Programming Guide)",
        switch="device.fused_rope_attention",
        off=False,
        improves="time a decode step: rotation, cache write and attention are one launch, which asks for earlier keys before queries are there; "
        "single queries beside prompts are attended to by the same kernel",
        off_means="rotation with the cache write and attention are two launches, one behind the other; beside prompts attention is Triton's",
        needs_gpu=True,
        ablation="every_step",
    ),
    Technique(
        name="cascade_attention",
        source="Hydragen (Juravsky et al. 2024); cascade inference in FlashInfer (Ye et al., MLSys 25); ChunkAttention (Ye et al., ACL 24)",
        switch="device.cascade_attention",
        off=False,
        improves="time a decode step of 16 requests or more that begin with the same blocks: those are read once for many",
        off_means="each sequence reads all its keys, those that others read, too",
        needs_gpu=True,
    ),
    Technique(
        name="unified_maximum",
        source="FlashDecoding++ (Hong et al., MLSys 24), section 3: asynchronized softmax with unified maximum value",
        switch="device.unified_maximum",
        off=False,
        improves="time of decode attention: no tile waits for its highest score, no sum is rescaled; answers stay right by a guard. "
        "Steps go without fused_rope_attention then, which gains more",
        off_means="exponentials are relative to the highest score so far, and sums are rescaled when it rises",
        needs_gpu=True,
        ablation="decode_steps",
    ),
    Technique(
        name="programmatic_launch",
        source="programmatic dependent launch (CUDA 12 on Hopper); No Bubbles (Hazy Research, 2025) on what launches cost at batch 1",
        switch="device.programmatic_launch",
        off=False,
        improves="time a decode step: a kernel's programs are there, and its weights under way, when the one before ends",
        off_means="a kernel begins when the one before has ended",
        needs_gpu=True,
        ablation="decode_steps",
    ),
    Technique(
        name="prompt_graphs",
        source="CUDA graphs (CUDA C++ Programming Guide); steps padded to recorded sizes (Nimble, Kwon et al., NeurIPS 20, for fixed ones)",
        switch="device.prompt_graphs",
        off=False,
        improves="ms to the first token of prompts that the host bounds, and steps of chunks beside decoding rows: up to 2,048 tokens are one launch",
        off_means="a step with prompts is launched kernel by kernel, seven to ten a layer",
        needs_gpu=True,
    ),
    Technique(
        name="activation_arena",
        source="TurboTransformers (Fang et al., PPoPP 21), section 4.2: the sequence-length-aware allocator; greedy by size (Pisarchyk and Lee 2020)",
        switch="device.activation_arena",
        off=False,
        improves="ms to the first token of prompts that the host bounds: results of a step lie in one buffer, at places planned by lifetime",
        off_means="each result is a request to torch's caching allocator, a few hundred a step",
        needs_gpu=True,
    ),
    Technique(
        name="batch_invariant",
        source="Defeating Nondeterminism in LLM Inference (He and Thinking Machines Lab, 2025)",
        switch="device.batch_invariant",
        off=False,
        improves="repeatability: an answer's tokens and logprobs have the same bits alone and in any batch; costs time, which its benchmark shows",
        off_means="each batch gets the kernels and splits of sums that are quickest for it",
    ),
)


def find_technique(name: str) -> Technique:
    """By name, with hyphens or underscores. Raises ConfigError with the names there are."""
    for technique in TECHNIQUES:
        if technique.name == name.replace("-", "_"):
            return technique
    known = ", ".join(technique.name for technique in TECHNIQUES)
    raise ConfigError(f"There is no technique {name!r}; choose one of {known}.")


def describe() -> list[dict[str, Any]]:
    """The register as plain data (``headrace techniques --json``)."""
    return [
        {
            "name": item.name,
            "source": item.source,
            "switch": item.switch,
            "default": item.default_state,
            "off": item.off,
            "improves": item.improves,
            "off_means": item.off_means,
            "ablate": item.ablate,
        }
        for item in TECHNIQUES
    ]
