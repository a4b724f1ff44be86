"""A module that takes a minute to import, and a process of its own meanwhile: a kernel that takes long to compile."""

from __future__ import annotations

import subprocess

subprocess.run(["sleep", "60"], check=True)
