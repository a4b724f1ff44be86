"""The flags of ``headrace bench kernels``.

What lives here: those, for help and completion. What may not: torch, which everything else of that benchmark (kernels.py) needs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.bench.arguments import count, output, positive

DTYPES = ("bfloat16", "float32", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="folder with the config.json whose shapes to use (default: Llama-3.2-1B's)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 512], help="tokens in a call (default: 1 16 512)")
    parser.add_argument("--context", type=count, default=1024, help="tokens of context in attention (default: 1024)")
    parser.add_argument("--ops", nargs="+", metavar="OP", default=(), help="operations, like linear and rms_norm (default: all)")
    parser.add_argument("--seconds", type=positive, default=0.3, help="time for each row of the table (default: 0.3)")
    parser.add_argument("--batch-invariant", action="store_true", help="time what --batch-invariant would choose, beside torch's own")
    parser.add_argument("--threads", type=count, help="default: torch's own choice")
    parser.add_argument("--tune", action="store_true", help="find what computes products of few and of many rows best on this card, and keep it")
    parser.add_argument("--output-json", type=output, metavar="FILE", help="write all rows as JSON")
