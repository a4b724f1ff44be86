"""Adapters in the control plane: who waits for which slot, what is read when, and what a folder must say."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from headrace.cache.adapters import AdapterBlocks
from headrace.cache.block_pool import BlockPool
from headrace.config import AdapterConfig
from headrace.engine import connection as frames
from headrace.engine.core import EngineCore
from headrace.engine.executor import AdapterOutcome, DropAdapter, LoadAdapter
from headrace.engine.grammar_masks import NO_DRAFTS
from headrace.engine.keyed_hash import adapter_blocks, keyed_hash_info
from headrace.engine.loop import EngineLoop
from headrace.engine.output import refusal_of
from headrace.errors import ConfigError, HeadraceError, InvalidRequest, ModelError, NotFound
from headrace.lora.peft import read_adapter
from headrace.lora.registry import AdapterRegistry, adapter_folder
from headrace.models.families import spec_from_config
from headrace.request import FinishReason, SequenceOutput, StructuredOutputs, TokenMasks, adapter_name
from headrace.scheduler.events import AddRequest, RefuseRequest
from headrace.scheduler.step_planner import AdapterClaims
from headrace.spec import AdapterSpace
from tests.support.hash_engine import (
    VOCAB,
    Answers,
    CheckedExecutor,
    assert_at_rest,
    check_books,
    engine,
    plans_of,
    request,
    run,
)
from tests.support.residue_masks import ResidueMasks

LLAMA = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
SPEC = spec_from_config(LLAMA)
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def core_with(
    most: int, held: int = 64, names: int = 9, fault: Any = None, num_blocks: int = 64, own: int = 0, **more: Any
) -> EngineCore:
    space = AdapterSpace(max(most, held if own else 2 * most), most, own)
    info = keyed_hash_info(
        vocab_size=VOCAB, max_model_len=200, max_num_seqs=8, num_blocks=num_blocks, block_size=4, adapters=space
    )
    executor = CheckedExecutor(info, fault=fault)
    core = engine(info=info, executor=executor, **more)
    core.adapters = AdapterRegistry(lambda folder: None, executor.control, held, identify=lambda folder: "")
    for number in range(names):
        core.adapters.register(f"a{number}", f"/{number}")
    return core


def bare_desk(told: list[Any], most_held: int, **more: Any) -> AdapterRegistry:
    """Keys are names, and a #."""
    return AdapterRegistry(lambda folder: None, told.append, most_held, identify=lambda folder: "", **more)


def alone(adapter: str | None, prompt: list[int], tokens: int = 6) -> tuple[int, ...]:
    core = core_with(1)
    core.add(request(0, prompt, adapter=adapter, max_tokens=tokens))
    return tuple(run(core).tokens[0, 0])


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    ("most", "held", "blocks", "own"), [(1, 1, 64, 0), (2, 3, 12, 0), (2, 3, 64, 6), (8, 9, 24, 0)]
)
def test_every_answer_is_that_of_its_adapter_alone(depth: int, most: int, held: int, blocks: int, own: int) -> None:
    """In blocks of the KV cache, which are few, and in some of their own."""
    core, wanted = core_with(most, held, num_blocks=blocks, own=own, depth=depth), {}
    plans = plans_of(core)
    for number in range(24):
        adapter = None if number % 5 == 4 else f"a{number * 7 % 9}"
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, number % 3]  # prefixes that would be shared
        core.add(request(number, prompt, adapter=adapter, max_tokens=6, n=1 + number % 2))
        wanted[number] = alone(adapter, prompt) if number % 2 == 0 else None
    answers = run(core, each_step=lambda core, _: check_books(core))
    assert all(tuple(answers.tokens[number, 0]) == tokens for number, tokens in wanted.items() if tokens is not None)
    assert len({tokens for tokens in wanted.values()}) > 6
    assert_at_rest(core)
    slot_of: dict[int, int] = {}
    for plan in plans:
        slot_of.update({new.row: new.adapter_slot for new in plan.rows_added})
        assert len({slot_of[row] for row in plan.rows} - {-1}) <= most


def test_others_pass_one_that_waits_and_it_is_not_starved() -> None:
    """One slot, and its adapter's requests keep coming: the one that wants another still gets its turn."""
    core = core_with(1)
    core.add(request(0, [1, 2], adapter="a0", max_tokens=9))
    core.add(request(1, [1, 2], adapter="a1", max_tokens=2))
    core.add(request(2, [1, 2], max_tokens=2))
    answers = Answers()
    for number in range(3, 40):
        core.add(request(number, [3, number], adapter="a0", max_tokens=9))
        answers.take(core.step())
        if number == 8:
            assert (2, 0) in answers.finished and (1, 0) not in answers.tokens, "who wants none goes past who waits"
            state = core.explain(1)
            assert state is not None and state.wait is not None and state.wait.kind == "adapter"
    assert (1, 0) in answers.finished, "it waited for the one that ran, and for none that came later"
    run(core, answers=answers)
    assert_at_rest(core)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_step_brings_its_adapters_in_again(depth: int) -> None:
    """What a device holds after a failure is not known any more (this one forgets it)."""
    core = core_with(2, depth=depth, fault=lambda plan: plan.step_id == 2)
    for number in range(2):
        core.add(request(number, [1, 2, number], adapter=f"a{number}", max_tokens=5))
    core.add(request(2, [1, 2, 9], adapter="a0", max_tokens=5))
    answers = run(core)
    assert FinishReason.ERROR in {each.reason for each in answers.finished.values()}
    core.add(request(3, [1, 2, 9], adapter="a0", max_tokens=6))
    run(core, answers=answers)
    assert tuple(answers.tokens[3, 0]) == alone("a0", [1, 2, 9])
    assert_at_rest(core)


def books_of(slots: int, blocks: int, **sizes: int) -> tuple[AdapterBlocks, BlockPool]:
    """Adapters of so many blocks each, in a pool that sequences share."""
    pool = BlockPool(blocks, lambda block: books.evict(block))
    books = AdapterBlocks(AdapterSpace(slots, slots), pool)
    for name, size in sizes.items():
        books.expect(name, size)
    return books, pool


def test_blocks_of_an_idle_adapter_are_taken_from_the_one_used_longest_ago() -> None:
    books, pool = books_of(3, 8, x=3, y=2, z=4)
    x, missing = books.take("x")
    y, _ = books.take("y")
    assert missing and pool.num_available == 3 and books.to_take("x") == 0 and books.to_take("z") == 4
    books.release(x, -1)
    books.release(y, -1)
    assert pool.num_available == 8 and (pool.num_cached, books.num_resident) == (5, 2)
    assert books.take("x") == (x, False), "it is still there"
    books.release(x, -1)
    z, _ = books.take("z")
    assert not books.is_resident("y") and books.is_resident("x"), (
        "one of y's blocks was wanted, so all of them are free"
    )
    assert len({x.slot, z.slot}) == 2 and set(x.blocks).isdisjoint(z.blocks) and pool.num_available == 4
    for _ in range(4):
        pool.allocate()
    assert not books.is_resident("x") and pool.num_available == 0 and books.is_resident("z"), (
        "a sequence's turn to take"
    )
    assert books.num_brought == 3


def test_an_adapter_in_flight_keeps_its_blocks_and_gives_its_slot_when_there_is_no_other() -> None:
    books, pool = books_of(1, 8, x=3, y=2)
    x, _ = books.take("x")
    assert books.join(x) is x
    books.release(x, 5)
    books.release(x, 6)
    assert books.num_leaving == 3 and not books.can_place("y") and pool.num_available == 5
    books.retire(5)
    assert books.num_leaving == 3 and books.to_take("x") == 0
    books.retire(6)
    assert books.num_leaving == 0 and books.can_place("y") and books.to_take("x") == 3
    y, _ = books.take("y")
    assert (y.slot, books.num_resident, pool.num_available) == (x.slot, 1, 6)


def test_what_a_device_has_lost_is_forgotten_while_sequences_still_have_it() -> None:
    books, pool = books_of(2, 8, x=3)
    x, _ = books.take("x")
    books.clear()
    again, missing = books.take("x")
    assert missing and set(again.blocks).isdisjoint(x.blocks) and pool.num_available == 2
    books.release(x, -1)
    assert pool.num_available == 5 and books.is_resident("x")
    books.release(again, -1)
    assert pool.num_available == 8 and (pool.num_cached, pool.num_free) == (3, 5)


def test_the_first_that_waits_claims_the_adapter_with_the_fewest_sequences() -> None:
    books, _ = books_of(2, 8, x=1, y=1, z=1, w=1)
    for name in "xy":
        books.take(name)
    assert AdapterClaims(books, 2, ("x",)).to_take("z") == 1 and AdapterClaims(books, 2, ("x", None)).admits("x")
    full = AdapterClaims(books, 2, ("x", "x", "y"))
    assert not full.admits("z") and not full.admits("y") and full.admits("x"), "z has claimed y's: that has fewer"
    assert not full.admits("w") and not full.admits("x") and full.admits(None)


def test_adapters_that_run_have_half_of_the_blocks_and_who_waits_for_room_is_not_passed() -> None:
    books, _ = books_of(9, 8, x=2, y=1, large=2, small=1, huge=7)
    claims = AdapterClaims(books, 9, ("x", "y"))
    assert claims.admits("small") and not claims.admits("large")
    assert not claims.admits("small"), "it would take the room that the large one waits for"
    assert not claims.admits("y") and not claims.admits("x"), "each of them claims one"
    assert AdapterClaims(books, 9, ()).admits("huge"), "one may be of any size"
    claims = AdapterClaims(books, 9, ("x", "y"))
    claims.take("small")
    assert not claims.admits("huge")


def test_host_memory_bounds_what_is_held_and_how_much_is_read_ahead() -> None:
    told: list[Any] = []
    desk = bare_desk(told, 99, most_blocks=5)
    for number in range(40):
        desk.register(f"a{number}", f"/{number}")
        desk.begin(request(number, [1], adapter=f"a{number}"))
    desk.take_ready((), ())
    assert len(told) == 32, "nobody knows how large they are"
    desk.take_ready([AdapterOutcome(f"a{number}#", blocks=2) for number in range(32)], ())
    assert len(told) == 32, "all of them have just begun"
    desk.take_ready((), ("a1#",))
    assert {each.name for each in told[32:] if isinstance(each, DropAdapter)} == {f"a{n}#" for n in range(31) if n != 1}
    assert [each.name for each in told[32:] if isinstance(each, LoadAdapter)] == [f"a{n}#" for n in range(32, 40)]


class _Kept(ResidueMasks):
    """Follows the grammars of requests that have been taken, as long as these are to be kept."""

    def take_compiled(self, wait: float) -> list[AddRequest | RefuseRequest]:
        taken = super().take_compiled(wait)
        self.seconds = {**self.seconds, **{event.request.request_id: 0.0 for event in taken}}
        return taken

    def keep(self, request_ids: Container[int]) -> None:
        self.seconds = {each: seconds for each, seconds in self.seconds.items() if each in request_ids}

    def masks(self, wanted: Any, drafts: Any = NO_DRAFTS) -> TokenMasks:
        assert all(sequence.request_id in self.seconds for _, sequence in wanted)
        return super().masks(wanted, drafts)


def test_a_grammar_is_kept_while_its_request_waits_for_its_adapter() -> None:
    masks: Any = _Kept(VOCAB)
    core = core_with(1, held=1, masks=masks)
    for number in range(3):
        params = StructuredOutputs(choice=(f"{number} 7",))
        core.add(request(number, range(9), adapter=f"a{number}", structured_outputs=params))
    answers = run(core)
    assert [{token % 7 for token in answers.tokens[number, 0]} for number in range(3)] == [{0}, {1}, {2}]


def test_an_adapter_takes_its_blocks_beside_its_sequences() -> None:
    """A request that fits alone and not beside its adapter is told; one that fits beside it is answered."""
    core = core_with(2, num_blocks=8)
    sizes = {f"a{number}": adapter_blocks(f"a{number}#") for number in range(9)}
    large = max(sizes, key=sizes.__getitem__)
    assert sizes[large] == 3
    core.add(request(0, range(21), adapter=large))
    core.add(request(1, range(10), adapter=large, max_tokens=50))
    core.add(request(2, range(21)))
    answers = run(core, each_step=lambda core, _: check_books(core))
    assert answers.finished[0, 0].reason is FinishReason.ERROR
    assert "takes at most 19 beside adapter" in str(answers.finished[0, 0].message)
    assert answers.finished[0, 0].param == "prompt"  # the request's own, not a failure of the engine
    assert len(answers.tokens[1, 0]) == 10 and len(answers.tokens[2, 0]) == 8
    assert_at_rest(core)


def test_the_adapter_of_the_first_that_waits_is_brought_ahead_of_its_turn() -> None:
    core = core_with(4, max_num_seqs=1)
    plans = plans_of(core)
    core.add(request(0, [1, 2], adapter="a0", max_tokens=9))
    core.add(request(1, [1, 2], adapter="a1", max_tokens=2))
    run(core)
    brought = {name: plan.step_id for plan in plans for _, name, _ in plan.adapters}
    begun = {new.sequence_id: plan.step_id for plan in plans for new in plan.rows_added}
    assert brought["a0#"] == begun[0] and begun[0] <= brought["a1#"] < begun[1]
    assert_at_rest(core)


def test_asleep_a_device_keeps_no_adapter() -> None:
    core = core_with(2)
    for level in (1, 2):
        core.add(request(level, [1, 2, 3], adapter="a0"))
        core.sleep(level)
        answers = run(core)
        assert core.asleep == level and core.stats().adapters is not None and core.stats().adapters.resident == 0
        assert tuple(answers.tokens[level, 0]) == alone("a0", [1, 2, 3], 8)
        core.wake()
    assert_at_rest(core)


def test_the_desk_reads_ahead_and_makes_room_in_order() -> None:
    told: list[Any] = []
    desk = bare_desk(told, 2)
    for name in "xyz":
        desk.register(name, f"/{name}")
    for number, name in enumerate("xyzx"):
        desk.begin(request(number, [1], adapter=name))
    assert not desk.take_ready([], ()) and told == [LoadAdapter("x#", "/x"), LoadAdapter("y#", "/y")]
    ready = desk.take_ready([AdapterOutcome("x#"), AdapterOutcome("y#", "/y/a.json is damaged")], ())
    assert [each.message for each in ready if isinstance(each, RefuseRequest)] == ["y/a.json is damaged"]
    assert [(type(each).__name__, each.request.request_id) for each in ready] == [
        ("AddRequest", 0),
        ("RefuseRequest", 1),
        ("AddRequest", 3),
    ]
    assert told[2:] == [LoadAdapter("z#", "/z")] and [each.request_id for each in desk.waiting] == [2]
    desk.drop(2)
    assert not desk.waiting and desk.take_ready([AdapterOutcome("z#")], ()) == [] and not desk.busy


def test_a_name_that_comes_back_is_another_adapter() -> None:
    desk = AdapterRegistry(lambda folder: None, lambda order: None, 4)
    first = desk.register("x", "/one")
    assert desk.register("x", "/one") == first
    with pytest.raises(InvalidRequest, match="unload it first"):
        desk.register("x", "/two")
    for again, said in ((False, "give load_inplace"), (None, "unload it first")):
        with pytest.raises(InvalidRequest, match=said):
            desk.load("x", "/two", again)
    desk.load("x", "/two", True)
    assert desk.key("x") != first
    desk.forget(desk.key("x"))  # it could not be read
    assert desk.key("x") == first
    desk.unregister("x")
    with pytest.raises(NotFound):
        desk.unregister("x")
    assert desk.register("x", "/two") != first
    with pytest.raises(InvalidRequest, match="no adapter 'y'"):
        desk.begin(request(0, [1], adapter="y"))


def test_replicas_that_see_the_same_files_call_an_adapter_alike(tmp_path: Path) -> None:
    """Whenever each of them finds it, and whatever it had before; files in the place of others are another
    adapter, whatever their size and date."""
    file, told = write(tmp_path / "x", GOOD) / "adapter_model.safetensors", list[Any]()
    one, other, late = (AdapterRegistry(lambda folder: None, told.append, 4, str(tmp_path)) for _ in range(3))
    key = one.key("x")
    one.unregister("x")
    late.unregister("x")  # it never asked for it, and could have
    assert one.key("x") == other.key("x") == key and adapter_name(key) == "x"
    before, again = file.stat(), tmp_path / "again"
    again.write_bytes(file.read_bytes())
    os.utime(again, ns=(before.st_atime_ns, before.st_mtime_ns))
    again.replace(file)
    other.unregister("x")
    assert one.key("x") == key != other.key("x") == late.key("x")


def test_files_that_have_changed_are_another_adapter_when_they_are_read_again(tmp_path: Path) -> None:
    """Though its name was never taken away. One that was damaged is looked for anew."""
    write(tmp_path / "x", GOOD)
    told: list[Any] = []
    desk = AdapterRegistry(lambda folder: None, told.append, 1, str(tmp_path))
    desk.register("y", "/y")
    first = desk.key("x")

    def asked(number: int, name: str, error: str | None = None) -> str | None:
        desk.begin(request(number, [1], adapter=name))
        for _ in range(2):
            desk.take_ready((), ())
        (ready,) = desk.take_ready([AdapterOutcome(told[-1].name, error)], ())
        return ready.request.adapter

    assert asked(0, "x") == first and asked(1, "y") == desk.key("y")
    (tmp_path / "x" / "adapter_config.json").unlink()
    write(tmp_path / "x", GOOD, r=3)
    assert asked(2, "x", "it is damaged") == desk.key("x") != first
    damaged = desk.key("x")
    write(tmp_path / "x", {})
    assert asked(3, "x") == desk.key("x") != damaged


def test_who_waits_for_an_adapter_that_is_loaded_anew_gets_that(tmp_path: Path) -> None:
    """Or that is found in the folder again; where there is none any more, it is told."""
    told: list[Any] = []
    desk, names = AdapterRegistry(lambda folder: None, told.append, 4, str(tmp_path)), ("x", "y", "z")
    for number, name in enumerate(names):
        desk.require(name, str(write(tmp_path / "x", GOOD)) if name == "x" else f"/{name}")
        desk.begin(request(number, [1], adapter=name))
        desk.unregister(name)
    desk.register("y", "/other")
    wanted = [desk.key("x"), desk.key("y")]
    (refused,) = (event for _ in range(3) for event in desk.take_ready((), ()))
    assert isinstance(refused, RefuseRequest) and "'z' was unloaded before its turn" in refused.message
    ready = desk.take_ready([AdapterOutcome(key) for key in wanted], ())
    assert [event.request.adapter for event in ready] == wanted and {*wanted} == {each.name for each in told}


def test_an_adapter_is_open_again_once_nobody_waits_for_its_place() -> None:
    """At once. An operator waits for it, too."""
    desk = bare_desk([], 1)
    for number, name in enumerate("xy"):
        desk.register(name, f"/{name}")
        desk.begin(request(number, [1], adapter=name))
    desk.take_ready((), ())
    assert len(desk.take_ready([AdapterOutcome("x#")], ())) == 1
    desk.begin(request(2, [1], adapter="x"))
    assert not desk.take_ready((), ("x#",)), "it shall give its place to the one that wants y"
    desk.drop(1)
    assert len(desk.take_ready((), ("x#",))) == 1
    desk.preload("y")
    desk.take_ready((), ("x#",))
    desk.begin(request(3, [1], adapter="x"))
    for in_use in (("x#",), ("x#",), ()):
        assert not desk.take_ready((), in_use)
    assert desk.verdict("y#") is None and desk.num_held == 1


def test_who_loads_an_adapter_is_answered_though_nobody_says_anything_more() -> None:
    core, said, waits = core_with(1, names=0), list[Any](), list[int]()

    def wait() -> list[Any]:
        waits.append(len(said))
        loop._running = len(waits) == 1
        return [(SimpleNamespace(send=said.append), frames.LoadAdapter(7, "x", "/x"))] if loop._running else []

    links: Any = SimpleNamespace(poll=list, wait=wait)
    loop = EngineLoop(cast(Any, SimpleNamespace(core=core)), links, cast(Any, MagicMock(turn=0)))
    loop.run()
    assert waits == [0, 1], "it goes to sleep once it has answered"


def test_who_asks_for_an_adapter_that_has_just_gone_is_told_so_and_no_fault_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "pack_step", lambda outputs: outputs)
    core, said = core_with(1, names=0), list[SequenceOutput]()
    loop = EngineLoop(cast(Any, SimpleNamespace(core=core)), cast(Any, None), cast(Any, None))
    loop._add(cast(Any, SimpleNamespace(send=said.extend)), request(1, [1], adapter="gone"))
    (answer,) = said
    assert answer.finished is not None
    refusal = refusal_of(answer.finished)
    assert isinstance(refusal, InvalidRequest) and (refusal.status, refusal.param) == (400, "model")


def test_what_could_not_be_read_is_tried_again_once_it_was_loaded_anew() -> None:
    told: list[Any] = []
    desk = bare_desk(told, 2)
    for number, error in enumerate(("it is damaged", None)):
        desk.register("x", "/x")
        desk.begin(request(number, [1], adapter="x"))
        desk.take_ready((), ())
        (ready,) = desk.take_ready([AdapterOutcome("x#", error)], ())
        assert isinstance(ready, RefuseRequest if error else AddRequest)
        desk.unregister("x")
    assert told == [LoadAdapter("x#", "/x")] * 2


def test_names_stay_within_their_folder(tmp_path: Path) -> None:
    (tmp_path / "in" / "good").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "in" / "good"):
        (folder / "adapter_config.json").write_text("{}")
    assert adapter_folder(tmp_path / "in", "good") == tmp_path / "in" / "good"
    for name in ("..", ".", "", "../in/good", "/etc", "good/../good", "good\0", "x" * 300, "good/"):
        assert adapter_folder(tmp_path / "in", name) is None, name


def test_settings_that_cannot_be() -> None:
    assert (
        AdapterConfig(lora_modules=("x=/y",)).enable_lora
        and AdapterConfig(lora_dir="/y").space(256, 600) == AdapterSpace(600, 256)
        and AdapterConfig(max_loras=8).space(256) == AdapterSpace(32, 8)
    )
    for wrong, said in (
        ({"max_lora_rank": 257}, "1 to 256"), ({"max_loras": 8, "max_cpu_loras": 4}, "at least as many"),
        ({"lora_modules": ("x=/y", "x=/z")}, "twice"), ({"lora_modules": ("../x=/y",)}, "letters"), ({"lora_modules": ("x",)}, "NAME=PATH"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            AdapterConfig(**wrong)  # type: ignore[arg-type]


# --- folders


def write(folder: Path, tensors: dict[str, tuple[str, list[int]]], gaps: int = 0, **config: Any) -> Path:
    """Tensors of zeros: a header as safetensors has it. ``gaps``: bytes by which each overlaps the one before."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = 4 if dtype == "F32" else 2 if dtype == "BF16" else 1
        for each in shape:
            size *= each
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size - gaps
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(at + gaps))
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


GOOD: dict[str, tuple[str, list[int]]] = {f"{Q}.lora_A.weight": ("F32", [2, 8]), f"{Q}.lora_B.weight": ("BF16", [8, 2])}


def test_a_folder_that_fits(tmp_path: Path) -> None:
    (found,) = read_adapter(write(tmp_path, GOOD), SPEC, 16).factors
    assert (found.rank, found.scale, found.module.part, found.module.outs) == (2, 2.0, 0, 8)
    (found,) = read_adapter(write(tmp_path, GOOD, use_rslora=True, alpha_pattern={"q_proj": 6}), SPEC, 16).factors
    assert found.scale == pytest.approx(6 / 2**0.5)
    bare = {key.replace(".model.model.", ".model."): value for key, value in GOOD.items()}
    assert read_adapter(write(tmp_path, bare), SPEC, 16).rank == 2, "as those of a bare model are called"


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        (GOOD, {"peft_type": "IA3"}, "peft_type 'IA3'"),
        (GOOD, {"bias": "all"}, "sets bias"),
        (GOOD, {"modules_to_save": ["lm_head"]}, "sets modules_to_save"),
        (GOOD, {"r": 4}, "has rank 2, but the config says 4"),
        (GOOD, {"lora_alpha": "much"}, "lora_alpha is 'much'"),
        (GOOD, {"lora_alpha": 1e999}, "lora_alpha is inf"),
        (GOOD, {"lora_alpha": 10**400}, "lora_alpha is 10+; a finite number"),
        (GOOD, {"use_dora": True}, "magnitudes of model.layers.0.self_attn.q_proj"),
        (GOOD, {"rank_pattern": {"(a+)+$": 2}}, "only names of modules are read"),
        (GOOD, {"alpha_pattern": [1]}, "only names of modules are read"),
        (GOOD, {"rank_pattern": 5}, "rank_pattern has '5'; only names"),
        ({**GOOD, f"{Q}.lora_A.weight": ("F32", [2, 9])}, {}, r"is \[2, 9\] of F32"),
        ({**GOOD, f"{Q}.lora_B.weight": ("F32", [2, 8])}, {}, r"calls for \[8, 2\]"),
        ({**GOOD, f"{Q}.lora_A.weight": ("I8", [2, 8])}, {}, "of floats"),
        ({**GOOD, f"{Q}.lora_A.weight": ("F32", [0, 8]), f"{Q}.lora_B.weight": ("F32", [8, 0])}, {"r": 0}, "rank 0"),
        ({f"{Q}.lora_A.weight": ("F32", [2, 8])}, {}, "has lora_A of"),
        ({**GOOD, "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": ("F32", [2, 8])}, {}, "no place for"),
        ({**GOOD, f"{Q.replace('.model.model', '.model')}.lora_A.weight": ("F32", [2, 8])}, {}, "two tensors lora_A"),
        ({**GOOD, f"{Q}.bias": ("F32", [8])}, {}, "no place for"),
        ({}, {}, "holds no tensor"),
    ],
)  # fmt: skip
def test_a_folder_that_does_not(tmp_path: Path, tensors: Any, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        read_adapter(write(tmp_path, tensors, **config), SPEC, 16)


def test_files_that_are_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="overlaps"):
        read_adapter(write(tmp_path / "overlap", GOOD, gaps=4), SPEC, 16)
    with pytest.raises(ModelError, match="Raise --max-lora-rank"):
        read_adapter(write(tmp_path / "rank", GOOD), SPEC, 1)
    pickled = write(tmp_path / "pickled", GOOD)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(ModelError, match="a pickle"):
        read_adapter(pickled, SPEC, 16)
    (tmp_path / "rank" / "adapter_config.json").write_text("[1]")
    for folder in (tmp_path / "rank", tmp_path / "nothing", tmp_path):
        with pytest.raises(HeadraceError):
            read_adapter(folder, SPEC, 16)
    cut = write(tmp_path / "cut", GOOD)
    data = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(data[:-3])
    with pytest.raises(ModelError, match="truncated"):
        read_adapter(cut, SPEC, 16)


def test_a_request_whose_adapter_cannot_be_read_ends_alone() -> None:
    core = core_with(2)
    outcomes = core.executor.outcomes
    core.executor.outcomes = lambda wait=0.0: [
        replace(each, error="NaN") if each.name == "a1#" else each for each in outcomes(wait)
    ]  # type: ignore[method-assign]
    for number in range(3):
        core.add(request(number, [1, 2], adapter=f"a{number}", max_tokens=3))
    answers = run(core)
    assert [answers.finished[number, 0].reason for number in range(3)] == [
        FinishReason.LENGTH,
        FinishReason.ERROR,
        FinishReason.LENGTH,
    ]
    assert answers.finished[1, 0].message == "NaN" and answers.finished[1, 0].param == "model"
    assert_at_rest(core)
