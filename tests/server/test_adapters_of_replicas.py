"""Adapters of two replicas under load: real clients that stream, leave and repeat themselves, an operator who replaces
files, a replica that is killed. Whatever happens, an answer is that of its adapter.

(Slow: the bundled model answers some hundred requests.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from openai import APIError, AsyncOpenAI

from tests.server.test_adapters import write
from tests.support.serving import SERVE, Server, serving, wait_for

MODELS = ("base", "first", "even", "odd", "moving")
STORY = (
    "The sea was calm, and the captain of the old ship looked at the sky for a long time before he said a word. " * 3
)
PROMPTS = (STORY + "Then he said", STORY + "But the sailors", "Once upon a time", "fn main() {")
FLAGS = (
    "--data-parallel-size", "2", "--supervise", "--device", "cpu", "--dtype", "float32", "--served-model-name", "base",
    "--max-loras", "2", "--max-cpu-loras", "3", "--allow-runtime-lora-updating", "--max-num-seqs", "8", "--block-size", "16",
)  # fmt: skip
CLIENTS, ASKED = 5, 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Load:
    """``files``: the versions that ``moving`` has had since a request began are those that may have answered it."""

    def __init__(self, server: Server, folder: Path, seed: int) -> None:
        self.server, self.folder, self.rng = server, folder, random.Random(seed)
        self.client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120)
        self.right: dict[tuple[str, str], str] = {}
        self.versions = ["even"]  # that moving has had
        self.told = Counter[str]()
        self.killed = False

    async def text(self, model: str, prompt: str) -> str:
        answer = await self.client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0)
        return answer.choices[0].text

    async def learn(self) -> None:
        """One after the other, before anything happens."""
        for model in MODELS[:-1]:
            for prompt in PROMPTS:
                self.right[model, prompt] = await self.text(model, prompt)
        assert len({self.right[model, PROMPTS[2]] for model in MODELS[:-1]}) == len(MODELS) - 1

    def check(self, model: str, prompt: str, text: str, since: int, *, whole: bool = True) -> None:
        models = self.versions[since:] if model == "moving" else [model]
        wanted = {self.right[each, prompt] for each in models}
        assert any(text == each if whole else each.startswith(text) for each in wanted), (model, prompt, text, wanted)

    async def ask(self, rng: random.Random) -> None:
        model, prompt, since = rng.choice(MODELS), rng.choice(PROMPTS), len(self.versions) - 1
        try:
            if rng.random() < 0.4:
                self.check(model, prompt, await self.text(model, prompt), since)
                self.told["whole"] += 1
            else:
                await self.stream(rng, model, prompt, since)
        except APIError as error:
            assert self.killed, f"{model}: {error}, and nobody was killed"
            self.told["lost"] += 1
            await asyncio.sleep(0.5)

    async def stream(self, rng: random.Random, model: str, prompt: str, since: int) -> None:
        """Half of them are left after some pieces."""
        most, text = rng.choice((2, 5, 99, 99)), ""
        stream = await self.client.completions.create(
            model=model, prompt=prompt, max_tokens=12, temperature=0, stream=True
        )
        async with stream:
            async for piece in stream:
                text += piece.choices[0].text
                most -= 1
                if not most:
                    break
        self.check(model, prompt, text, since, whole=most > 0)
        self.told["streamed" if most > 0 else "left"] += 1

    async def clients(self) -> None:
        async def one(rng: random.Random) -> None:
            for _ in range(ASKED):
                await self.ask(rng)

        await asyncio.gather(*(one(random.Random(self.rng.random())) for _ in range(CLIENTS)))

    async def operate(self) -> None:
        """Replaces the files of ``moving``, for ever; its name is taken away before, or not."""
        while True:
            await asyncio.sleep(self.rng.uniform(0.2, 1.0))
            self.versions.append("odd" if self.versions[-1] == "even" else "even")
            place(self.folder, self.versions[-1])
            with contextlib.suppress(OSError):
                asked = {"lora_name": "moving"}
                answer = await asyncio.to_thread(self.server.ask, "POST", "/v1/unload_lora_adapter", asked)
                assert answer.status == 200 or self.killed, answer.body
            self.told["replaced"] += 1

    async def kill(self) -> None:
        """One replica, when a third of all has been answered."""
        while sum(self.told.values()) < CLIENTS * ASKED // 3:
            await asyncio.sleep(0.05)
        self.killed = True
        os.kill(self.rng.choice(self.server.members("headrace.engine.process")), signal.SIGKILL)

    async def run(self) -> None:
        await self.learn()
        operating, killing = asyncio.create_task(self.operate()), asyncio.create_task(self.kill())
        await self.clients()
        await killing
        operating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await operating
        await asyncio.to_thread(wait_for, lambda: any("serves again" in line for line in self.server.lines), 60)
        since = len(self.versions) - 2
        for _ in range(2):  # one of each replica, more or less
            texts = await asyncio.gather(*(self.text(model, prompt) for model in MODELS for prompt in PROMPTS))
            for (model, prompt), text in zip([(m, p) for m in MODELS for p in PROMPTS], texts, strict=True):
                self.check(model, prompt, text, since)


def place(folder: Path, version: str) -> None:
    """At once, and with the same size and date."""
    link = folder.parent / "link"
    link.symlink_to(folder / version)
    link.replace(folder / "moving")


def at_rest(server: Server) -> bool:
    lines = server.ask("GET", "/metrics").body.decode().splitlines()
    busy = ("headrace_num_requests_running{", "headrace_num_requests_waiting{")
    return not any(float(line.split()[-1]) for line in lines if line.startswith(busy))


@pytest.mark.parametrize("apart", [(), ("--prefill-replicas", "1")], ids=["alike", "apart"])
def test_every_answer_is_that_of_its_adapter(tmp_path: Path, apart: tuple[str, ...]) -> None:
    folder = tmp_path / "in"
    for seed, name in enumerate(("first", "even", "odd")):
        write(folder / name, seed)
    place(folder, "even")
    with serving(*FLAGS, *apart, "--lora-dir", str(folder), command=SERVE) as server:
        load = Load(server, folder, seed=len(apart))
        asyncio.run(load.run())
        print(dict(load.told))
        assert min(load.told[kind] for kind in ("whole", "streamed", "left", "replaced")) > 3, load.told
        wait_for(lambda: at_rest(server), 20)
