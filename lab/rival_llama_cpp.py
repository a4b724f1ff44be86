"""The rival's side of ``python -m lab rival``: run by an interpreter that has llama-cpp-python; imports nothing of
Headrace.

Usage: python rival_llama_cpp.py GGUF PROMPT_TOKENS OUTPUT_TOKENS THREADS BATCH_THREADS; prints one JSON line.
Tokens go through the C API directly (llama_decode), so that no Python work is timed besides the call.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time


def main(arguments: list[str]) -> None:
    path, (prompt, output, threads, batch_threads) = arguments[0], map(int, arguments[1:])
    import llama_cpp as llama

    quiet = _LOG(lambda level, text, data: None)  # kept until the end: the library calls it whenever it likes
    llama.llama_log_set(quiet, ctypes.c_void_p(0))
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = prompt + output + 8, prompt, prompt
    params.n_threads, params.n_threads_batch = threads, batch_threads
    context = llama.llama_init_from_model(model, params)
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    _run(llama, context, vocab, prompt, output, 0)  # warm
    first, rest = _run(llama, context, vocab, prompt, output, 1)
    print(json.dumps({"prefill": [prompt / first], "decode": [output / rest]}))


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def _run(llama, context, vocab: int, prompt: int, output: int, seed: int) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """Seconds for the prompt, and for the output after it."""
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    draw = random.Random(seed)
    begin = time.perf_counter()
    _decode(llama, context, [draw.randrange(vocab) for _ in range(prompt)])
    middle = time.perf_counter()
    for _ in range(output):
        _decode(llama, context, [draw.randrange(vocab)])
    return middle - begin, time.perf_counter() - middle


def _decode(llama, context, tokens: list[int]) -> None:  # type: ignore[no-untyped-def]
    array = (llama.llama_token * len(tokens))(*tokens)
    status = llama.llama_decode(context, llama.llama_batch_get_one(array, len(tokens)))
    if status != 0:
        raise RuntimeError(f"llama_decode gave {status}")
    llama.llama_get_logits_ith(context, -1)[0]  # the logits are there: the step is done


if __name__ == "__main__":
    main(sys.argv[1:])
