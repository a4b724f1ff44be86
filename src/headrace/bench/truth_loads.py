"""The loads of ``headrace bench truth``: A, which prices are fitted to, and B, which they are held against. No part of B is one of A.

What lives here: the parts, and each as flags of bench serve, as dialogues and as a simulation's requests. What may not: running them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.bench.workload import Dialogue, Lengths, shared_prefix_dialogues, with_arrivals
from headrace.errors import ConfigError
from headrace.planner.workload import Asked, arriving, drawn

VOCAB = 1000  # ids of bench serve


@dataclass(frozen=True, slots=True)
class Part:
    """Requests of drawn lengths: ``clients`` at once, or ``rate`` arrivals a second. ``prefix``: tokens all of them begin with."""

    name: str
    count: int
    prompt: int
    output: int
    spread: float = 0.0
    clients: int | None = None
    rate: float | None = None
    prefix: int = 0
    seed: int = 0

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.prompt, self.output, self.spread)

    def asked(self) -> list[Asked]:
        made = drawn(self.count, self.lengths, prefix=self.prefix, num_prefixes=1, seed=self.seed)
        return made if self.rate is None else arriving(made, self.rate, burstiness=1.0, seed=self.seed)

    def dialogues(self, salt: int, vocab_size: int) -> list[Dialogue]:
        """``salt`` makes ids new, so that none is answered from the cache; lengths and arrivals stay."""
        made = shared_prefix_dialogues(self.count, self.lengths, num_prefixes=1, prefix_len=self.prefix, vocab_size=VOCAB, seed=self.seed)
        made = made if self.rate is None else with_arrivals(made, self.rate, seed=self.seed)
        return [replace(each, turns=tuple(replace(turn, new_ids=_salted(turn.new_ids, salt, vocab_size)) for turn in each.turns)) for each in made]

    def flags(self) -> list[str]:
        """Of headrace bench serve."""
        kind = ["--workload", "shared-prefix", "--prefix-len", str(self.prefix)] if self.prefix else []
        load = ["--request-rate", f"{self.rate:g}"] if self.rate is not None else ["--max-concurrency", str(self.clients or self.count)]
        lengths = ["--input-len", str(self.prompt), "--output-len", str(self.output), "--random-range-ratio", f"{self.spread:g}"]
        return [*kind, "--num-prompts", str(self.count), *lengths, *load, "--seed", str(self.seed)]

    @property
    def room(self) -> int | None:
        """Of a closed loop."""
        return None if self.rate is not None else self.clients or self.count


def _salted(ids: tuple[int, ...], salt: int, vocab_size: int) -> tuple[int, ...]:
    return tuple((each + salt) % vocab_size for each in ids)


def loads_for(kind: str, scale: float) -> tuple[list[Part], list[Part]]:
    """A and B for a device of that kind. ``scale`` multiplies requests and prompts. Raises ConfigError."""
    if not 0.0 < scale <= 100.0:
        raise ConfigError(f"--scale is {scale:g}; give a number above 0 and up to 100.")
    fitted, held = (_cpu_loads() if kind == "cpu" else _card_loads())
    return [_scaled(each, scale) for each in fitted], [_scaled(each, scale) for each in held]


def _scaled(part: Part, scale: float) -> Part:
    clients = part.clients and (part.clients if part.clients < 4 else max(2, round(part.clients * min(1.0, scale))))
    return replace(part, count=max(2, round(part.count * scale)), clients=clients)


def _cpu_loads() -> tuple[list[Part], list[Part]]:
    fitted = [Part("single", 10, 90, 6, 0.9, clients=1, seed=1)]
    fitted += [Part(f"decode-{clients}", clients, 12, 16, clients=clients, seed=2) for clients in (2, 3, 4, 6, 8, 12, 16)]
    fitted += [Part("long", 2, 700, 12, clients=2, seed=3), Part("mixed", 20, 150, 14, 0.9, clients=5, seed=4)]
    fitted += [Part("pauses", 8, 90, 5, 0.9, rate=0.8, seed=5)]  # most of them wake the engine
    held = [Part("closed", 24, 120, 20, 0.5, clients=4, seed=11), Part("open", 24, 100, 16, 0.5, rate=1.0, seed=12)]
    return fitted, held


def _card_loads() -> tuple[list[Part], list[Part]]:
    batches = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 320)
    fitted = [Part(f"decode-{batch}", batch, 64, 24, seed=batch) for batch in batches]
    fitted += [Part(f"long-{batch}", batch, prompt, 24, seed=batch) for batch, prompt in ((1, 12000), (4, 8000), (16, 3000), (48, 1500), (128, 800))]
    prompts = (8, 16, 40, 70, 100, 200, 300, 450, 700, 1100, 1600, 2500, 4000, 6000, 8000)
    fitted += [Part(f"prompt-{prompt}", 2, prompt, 2, clients=1, seed=prompt) for prompt in prompts]
    fitted += [Part("mixed", 150, 350, 80, 0.9, clients=48, seed=1), Part("open", 100, 500, 70, 0.9, rate=30.0, seed=3)]
    fitted += [Part("shared", 96, 100, 30, prefix=1100, seed=4)]
    held = [
        Part("open", 84, 700, 150, 0.5, rate=12.0, seed=11),
        Part("closed", 128, 1000, 120, 0.3, clients=64, seed=12),
        Part("burst", 200, 256, 200, 0.5, seed=13),
        Part("shared", 160, 64, 64, prefix=2048, seed=14),
    ]
    return fitted, held
