"""Before any test: two threads at most, no network by accident. Fixtures live in tests/support, next to what they make."""

from __future__ import annotations

import os

# Set before torch is imported: tests run tiny models, and several processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("HEADRACE_API_KEY", None)
os.environ.pop("HEADRACE_LOG_LEVEL", None)
