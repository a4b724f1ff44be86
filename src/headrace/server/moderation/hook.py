"""A user's moderation function in processes of its own, from the side that asks.

What lives here: starting, asking under a limit of time, ending. What may not: what is asked when (watch.py), the function (worker.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import sys
from collections.abc import Sequence
from typing import Any

from headrace.engine.template_frames import encode_frame
from headrace.errors import ConfigError, ModerationFailed

PROCESSES = 2  # that judge side by side
START_SECONDS = 60.0  # for the module to be imported
MAX_FRAME = 2**16  # bytes of an answer
_LENGTH = struct.Struct(">I")


class _Worker:
    """One process, used by one asker at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, spec: str, model_folders: Sequence[str]) -> _Worker:
        """Raises ConfigError when the function cannot be had."""
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", "headrace.server.moderation.worker", spec, *model_folders)
        worker = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))
        try:
            said = await asyncio.wait_for(worker._read(), START_SECONDS)
        except (TimeoutError, EOFError, OSError):
            said = {"error": f"importing it takes longer than {START_SECONDS:g} s, or ends the process"}
        if "error" in said:
            await worker.kill()
            raise ConfigError(f"--moderation {spec}: {said['error']}.")
        return worker

    async def ask(self, frame: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(frame)
        await self._process.stdin.drain()
        return await self._read()

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        (length,) = _LENGTH.unpack(await self._process.stdout.readexactly(_LENGTH.size))
        if length > MAX_FRAME:
            raise EOFError
        said: dict[str, Any] = json.loads(await self._process.stdout.readexactly(length))
        return said

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class HookPool:
    """Up to PROCESSES workers; one that fails to answer in ``seconds`` is killed, and the next asker gets a new one."""

    def __init__(self, spec: str, model_folders: Sequence[str], seconds: float, first: _Worker) -> None:
        self._spec, self._folders, self._seconds = spec, model_folders, seconds
        self._idle = [first]
        self._slots = asyncio.Semaphore(PROCESSES)

    @classmethod
    async def start(cls, spec: str, model_folders: Sequence[str], seconds: float) -> HookPool:
        """Raises ConfigError when the function cannot be had."""
        return cls(spec, model_folders, seconds, await _Worker.start(spec, model_folders))

    async def judge(self, text: str, prompt: str | None, *, final: bool) -> bool:
        """Whether the function wants the answer ended. Raises ModerationFailed when it raises, hangs or ends its process."""
        frame = encode_frame({"text": text, "prompt": prompt, "final": final})
        async with self._slots:
            worker = self._idle.pop() if self._idle else await self._restart()
            try:
                said = await asyncio.wait_for(worker.ask(frame), self._seconds)
            except TimeoutError:
                await worker.kill()
                raise ModerationFailed(f"The moderation function did not answer within {self._seconds:g} s, so the answer cannot be sent.") from None
            except (EOFError, OSError, ValueError):
                await worker.kill()
                raise ModerationFailed("The moderation function ended its process, so the answer cannot be sent.") from None
            except BaseException:  # cancelled: what it says later would be taken for the next answer
                await worker.kill()
                raise
            self._idle.append(worker)
        if "error" in said:
            raise ModerationFailed(f"The moderation function failed ({said['error']}), so the answer cannot be sent.")
        return bool(said["bad"])

    async def _restart(self) -> _Worker:
        try:
            return await _Worker.start(self._spec, self._folders)
        except ConfigError as error:
            raise ModerationFailed(f"The moderation function cannot be started again: {error.message}") from None

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        for worker in idle:
            await worker.kill()
