"""``headrace doctor``: what was found on this machine, what was chosen and why, where the memory goes.

What lives here: asking the components that know, and printing. What may not: choices, measuring (worker/).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from headrace.bench.arguments import declare
from headrace.commands.simulate_reports import CONTEXT, of_prices, sentences
from headrace.config import Decision, EngineConfig
from headrace.cost.profile import (
    DeviceIdentity,
    DeviceProfile,
    find_profile,
    profile_folder,
    said_bandwidth,
    said_rate,
    save_profile,
)
from headrace.errors import ConfigError, OutOfMemory
from headrace.flags import add_config_flags, add_model_argument, engine_config
from headrace.models import families
from headrace.observe.report import machine_facts, table
from headrace.planner.advice import advise
from headrace.planner.devices import Device, device_of, find_device, known_devices, with_calibrations
from headrace.planner.dovetail import Pair, advice, asked_of, memory_of, placements, rows_of, said_of
from headrace.planner.pricing import decode_load, priced
from headrace.portability import missing, process_status

if TYPE_CHECKING:
    from headrace.engine.assembly import Engine
    from headrace.engine.executor import Executor, ExecutorInfo
    from headrace.models.source import ModelSource
    from headrace.observe.metrics import StepRecorder
    from headrace.spec import DecoderSpec
    from headrace.worker.driver import CardFacts, DriverFacts
    from headrace.worker.residency import Ledger
    from headrace.worker.settings import GPU

UNMEASURED = (
    "No batch advice: this device was never measured. headrace doctor --profile measures it in under a minute; "
    "headrace simulate --advise covers other devices."
)
CARDS = tuple(known_devices())
NO_MODEL = "No batch advice: this executor computes no model. Leave --executor out."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    assumed = f"say instead which kernels would compute the model on such a card, and how fast: {', '.join(CARDS)}"
    declare(parser, "doctor.arguments", assume={"help": assumed})
    add_model_argument(parser)
    add_config_flags(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    from headrace.worker.settings import device_kind

    config = engine_config(args)
    if args.assume is not None:
        assumed = examine_card(config, args.assume)
        print(json.dumps(assumed, indent=1, default=str) if args.json else _render_assumed(assumed))
        return 0
    device = device_kind(config.device.device)
    report: dict[str, Any] = {"found": found(config.device.threads, device)}
    profile = _measure(device, quiet=args.json) if args.profile else None
    profile = profile or _stored(device)
    report["profile"] = _profile_facts(profile)
    if not args.no_load:
        report |= examine_drafts(config, device)
        try:
            report |= examine_engine(config, profile)
        except OutOfMemory as error:
            if "drafts" not in report:
                raise
            report["problem"] = error.message
        else:
            report["decisions"] += examine_formats(config)
            report["shape"] = examine_shape(config, device, thorough=args.profile)
    print(json.dumps(report, indent=1, default=str) if args.json else render(report))
    return 1 if "problem" in report else 0


def found(threads: int | None, device: str) -> dict[str, Any]:
    """Machine and software, and the limits of ``device``. Sets torch's threads as an engine would."""
    import torch

    from headrace.kernels.build.c_compiler import find_compiler
    from headrace.kernels.candidate import Declined
    from headrace.worker.host import available_memory, physical_cores
    from headrace.worker.settings import find_gpu, resolve_threads

    count, decision = resolve_threads(threads)
    torch.set_num_threads(count)
    compiler = find_compiler()
    limits = _limits_now(device)  # also makes torch start its threads: they are no part of a model's memory
    return {
        **{name: value for name, value in machine_facts().items() if name in ("machine", "versions")},
        "system": "; ".join((f"{platform.system()} {platform.release()}, {platform.machine()}", *missing())),
        "cores": f"{physical_cores()[1]}; {count} threads compute" + ("" if decision else ", as asked"),
        "memory": f"{available_memory() / 2**30:.1f} GiB available",
        "torch": f"{torch.__version__}, instructions {torch.backends.cpu.get_cpu_capability()}, {_onednn(torch.__config__.show())}",
        "compiler": f"{compiler.reason}; until then torch twins run"
        if isinstance(compiler, Declined)
        else str(compiler),
        "limits now": limits,
        "cuda": _card(find_gpu()),
    }


def _limits_now(device: str) -> str:
    """The limits measured now. A full card is reported as the reason for having none."""
    from headrace.worker.profile import limits_now

    try:
        return str(limits_now(device))
    except ConfigError as error:
        return f"not measured: {error.message}"


def _card(gpu: GPU) -> str:
    """The card with its driver and memory, or why there is none to compute on. Uses the driver, because torch would
    create a context for it."""
    import torch

    from headrace.worker.driver import ask_driver

    if gpu.problem is not None:
        return gpu.problem
    driver = ask_driver()
    said = (
        f"driver {driver.version} for CUDA up to {'.'.join(map(str, driver.cuda))}"
        if driver is not None
        else "driver unknown"
    )
    card = driver.card(str(torch.cuda.get_device_properties().uuid)) if driver is not None else None
    memory = f", {_free(card)}" if card is not None else ""
    others = [_other(driver, index) for index in range(1, torch.cuda.device_count())]
    return "; ".join(
        (f"{gpu.name}, compute capability {'.'.join(map(str, gpu.capability or ()))}, {said}{memory}", *others)
    )


def _other(driver: DriverFacts | None, index: int) -> str:
    """A further card that ranks could have."""
    import torch

    facts = torch.cuda.get_device_properties(index)
    card = driver.card(str(facts.uuid)) if driver is not None else None
    peer = (
        "reads the first one's memory"
        if torch.cuda.can_device_access_peer(index, 0)
        else "reaches the first one through the host"
    )
    return f"card {index}: {facts.name}, {'' if card is None else f'{_free(card)}, '}{peer}"


def _free(card: CardFacts) -> str:
    return f"{card.free / 2**30:.1f} of {card.total / 2**30:.1f} GiB free"


def _onednn(build: str) -> str:
    """The line of torch's build description that names oneDNN."""
    lines = [line.strip(" -") for line in build.splitlines() if "DNN" in line and " v" in line]
    return lines[0] if lines else "built without oneDNN"


def _measure(device: str, *, quiet: bool) -> DeviceProfile:
    """Measures the profile now and saves it. Raises ConfigError if the machine was busy."""
    from headrace.worker.profile import measure_profile

    profile = measure_profile(lambda line: None if quiet else print(line, file=sys.stderr), device)
    path = save_profile(profile)
    if not quiet:
        print(f"saved in {path}", file=sys.stderr)
    return profile


def _stored(device: str) -> DeviceProfile | None:
    from headrace.worker.profile import identity_here

    return find_profile(identity_here(device))


def _profile_facts(profile: DeviceProfile | None) -> dict[str, Any]:
    if profile is None:
        return {
            "measured": f"never (nothing for this device in {profile_folder()}); headrace doctor --profile does it in under a minute"
        }
    rates = {f"matrix product, {dtype}": said_rate(rate) for dtype, rate in profile.gemm_rates.items()}
    rates |= {
        f"... {dtype}, held for a second": said_rate(rate) for dtype, rate in profile.sustained_gemm_rates.items()
    }
    busy = (
        f"; other processes used {profile.others_share:.0%} of the CPUs meanwhile"
        if profile.others_share > 0.01
        else ""
    )
    return {
        "measured": f"{profile.date}, {_measured_on(profile.identity)}, torch {profile.versions.get('torch', '?')}{busy}",
        "read": f"{said_bandwidth(profile.read_bandwidth)} sustained, rounds within {profile.spread:.0%}, over {profile.working_set / 2**20:.0f} MiB",
        "copy": said_bandwidth(profile.copy_bandwidth),
        **rates,
        "small operator": f"{profile.launch_overhead * 1e6:.1f} µs" + _replayed(profile),
    }


def _measured_on(identity: DeviceIdentity) -> str:
    return (
        f"{identity.threads} threads" if identity.kind == "cpu" else f"{identity.name} ({', '.join(identity.features)})"
    )


def _replayed(profile: DeviceProfile) -> str:
    if not profile.graph_kernel:
        return ""
    return f" to launch; in a CUDA graph {profile.graph_kernel * 1e6:.2f} µs, of which {profile.graph_gap * 1e6:.2f} µs between two kernels"


def examine_engine(config: EngineConfig, profile: DeviceProfile | None) -> dict[str, Any]:
    """Starts the engine as every command does, runs its largest step, and closes it."""
    from headrace.engine.assembly import create_engine
    from headrace.worker.residency import resident_memory

    loaded = 0

    def note_memory(executor: Executor, recorder: StepRecorder) -> Executor:
        nonlocal loaded
        loaded = resident_memory()[0]
        return executor

    engine = create_engine(config, wrap=note_memory, with_tokenizer=False)
    try:
        info = engine.info
        report: dict[str, Any] = {
            "engine": {
                "model": info.model,
                "device": info.device,
                "dtype": info.dtype,
                "longest sequence": f"{info.max_sequence_tokens} tokens",
            },
            "decisions": [asdict(decision) for decision in info.decisions],
            "announced": dict(info.memory),
        }
        if "context" in info.memory:
            report["memory"] = _account_gpu(engine)
        elif "process" in info.memory and process_status():
            report["memory"] = _account(engine, resident_memory()[0] - loaded)
        # its modules are no part of that
        report["batch"] = examine_batch(config, engine.source.config, engine.core.executor.info, profile)
        return report
    finally:
        engine.close()


def examine_drafts(config: EngineConfig, device: str) -> dict[str, Any]:
    """Where a target and its draft model are best placed, if one is named. ``device``: that the target would have."""
    from headrace.engine.resolve import find_source
    from headrace.models.draft_source import find_draft

    settings = asked_of(config)
    if config.device.executor != "model" or settings is None:
        return {}
    model, devices = replace(config.model, load_format="dummy"), _devices()
    found_on = {
        kind: find_draft(model, settings.model or "", settings.quantization, _capability(kind)) for kind in devices
    }
    drafts_on = {kind: families.spec_from_config(each.config) for kind, (each, _) in found_on.items()}
    target = families.spec_from_config(find_source(config).config)
    found = placements(Pair(target, drafts_on, settings), config, devices, CONTEXT)
    said = f"One stream of {CONTEXT:,} tokens, a draft right with probability {said_of(settings.expected)} (acceptance); {memory_of(devices)}."
    drafts = {
        "said": [said, *_formats_of(found_on), advice(found, device)],
        "placements": [asdict(each) for each in found],
        "rows": rows_of(found),
    }
    return {"drafts": drafts}


def _formats_of(found_on: Mapping[str, tuple[ModelSource, Decision | None]]) -> list[str]:
    return [f"The draft on {kind}: {each.value}, {each.reason}." for kind, (_, each) in found_on.items() if each]


def _capability(kind: str) -> tuple[int, int] | None:
    from headrace.worker.settings import find_gpu

    return find_gpu().capability if kind == "cuda" else None


def _devices() -> dict[str, Device]:
    """This CPU, and the card, with their limits as they are known now."""
    import torch

    from headrace.worker.host import available_memory
    from headrace.worker.profile import resolve_profile
    from headrace.worker.settings import find_gpu

    kinds = {"cpu": available_memory()}
    if find_gpu().problem is None:
        kinds["cuda"] = torch.cuda.get_device_properties(0).total_memory
    profiles = {kind: resolve_profile(kind)[0] for kind in kinds}
    return {
        kind: with_calibrations(device_of(profile, kinds[kind], 0))
        for kind, profile in profiles.items()
        if profile is not None
    }


def examine_card(config: EngineConfig, name: str) -> dict[str, Any]:
    """Who would compute the model on a card of the catalogue, which need not be here, and what steps would take there.
    Raises ConfigError."""
    import torch

    from headrace.engine.resolve import find_source
    from headrace.kernels import AssumedKernels
    from headrace.kernels.candidate import Card
    from headrace.models.decoder import Decoder
    from headrace.techniques import in_use
    from headrace.worker.settings import resolve_dtype
    from headrace.worker.worker import kernel_decisions

    if name.lower() not in CARDS:
        raise ConfigError(f"--assume {name} is no card of the catalogue; give one of {', '.join(CARDS)}.")
    device = find_device(name, threads=1, memory=None, free_memory=0)
    assert device.chip is not None, "of a card"
    asked = replace(config.model, load_format="dummy")
    spec = families.spec_from_config(find_source(replace(config, model=asked)).config)
    dtype = resolve_dtype(config.model.dtype, spec.checkpoint_dtype, "cuda")[0]
    kernels = AssumedKernels(Card(device.name, *device.chip), techniques=in_use(config.device))
    with torch.inference_mode():
        decoder = Decoder(spec, kernels=kernels, dtype=dtype, device=torch.device("meta"), max_model_len=CONTEXT)
        decoder.finish_loading()
    rows = [[each.name, each.value, each.reason] for each in kernel_decisions(kernels)]
    steps = _steps_on(spec, config, device)
    return {"card": str(device), "kernels": rows, "steps": steps, "more": _on_more(spec, config, device)}


def _steps_on(spec: DecoderSpec, config: EngineConfig, device: Device) -> list[list[Any]]:
    """Rows, ms, the floor at the device's limits, and its share."""
    found = priced(spec, replace(config, model=replace(config.model, load_format="dummy")), device)
    steps = []
    for rows in (1, 8, 32, 128, 256):
        price = found.step_time.of_load(decode_load(found.groups, rows, CONTEXT), rows=rows)
        seconds, floor = price.seconds + price.host_seconds, price.floor_seconds
        steps.append([rows, round(seconds * 1e3, 2), round(floor * 1e3, 2), f"{floor / seconds:.0%}"])
    return steps


def _on_more(spec: DecoderSpec, config: EngineConfig, device: Device) -> list[str]:
    """What steps would take on several of these."""
    said = []
    for ranks in (2, 4, 8) if device.kind == "cuda" and config.device.num_ranks == 1 else ():
        with suppress(ConfigError):  # it does not divide
            shared = replace(config, device=replace(config.device, tensor_parallel_size=ranks))
            steps = ", ".join(f"{ms:g} ms with {rows}" for rows, ms, *_ in _steps_on(spec, shared, device))
            said.append(f"On {ranks} of these (-tp {ranks}): {steps} sequences.")
    return said


def _render_assumed(report: Mapping[str, Any]) -> str:
    twins = sorted({name.removeprefix("kernel ") for name, value, _ in report["kernels"] if value == "torch"})
    steps = table(("sequences", "ms", "at the limits", "share"), report["steps"])
    return "\n\n".join(
        (
            f"Assumed: {report['card']}",
            "Kernels\n" + _indent(table(("what", "value", "why"), report["kernels"])),
            f"torch computes by itself: {', '.join(twins)}" if twins else "a kernel of ours computes each of these",
            f"Steps that decode, {CONTEXT:,} tokens a sequence\n" + _indent("\n".join((steps, *report["more"]))),
        )
    )


def examine_batch(
    config: EngineConfig, model: Mapping[str, Any], info: ExecutorInfo, profile: DeviceProfile | None
) -> dict[str, Any]:
    """``config``: as requested; ``model``: its config.json; ``info``: of the engine built from both. If nothing can be
    said, the reason is a sentence, too."""
    if config.device.executor != "model":
        return {"said": [NO_MODEL]}
    if profile is None:
        return {"said": [UNMEASURED]}
    try:
        return _advice(config, model, info, profile)
    except ConfigError as error:
        return {"said": [f"No batch advice: {error.message}"]}


def _advice(
    config: EngineConfig, model: Mapping[str, Any], info: ExecutorInfo, profile: DeviceProfile
) -> dict[str, Any]:
    device = with_calibrations(device_of(profile, sum(info.memory.values()), 0))
    spec = families.spec_from_config(model)
    found, context = priced(spec, config, device), min(CONTEXT, info.max_model_len)
    advice = advise(found, context, info)
    said = [f"Steps that only decode, {context:,} tokens a sequence:", *sentences(advice), *of_prices(found, context)]
    said += _on_more(spec, config, device)
    return {"said": said, **asdict(advice), **found.pricing.facts(context)}


def examine_formats(config: EngineConfig) -> list[dict[str, Any]]:
    """How the model writes tool calls and reasoning, determined as a server would."""
    from headrace.engine.resolve import find_source
    from headrace.engine.tokenizer import load_tokenizer
    from headrace.server.parsing.choice import formats_of

    tokenizer = load_tokenizer(find_source(config))
    if tokenizer is None:
        return []
    try:
        return [asdict(decision) for decision in formats_of(tokenizer)[1]]
    finally:
        tokenizer.close()


def examine_shape(config: EngineConfig, device: str, *, thorough: bool) -> dict[str, Any]:
    """What the model's dimensions cost on this device. Call it when no engine is running."""
    import torch

    from headrace.bench.shape_advice import ShapeBench, advise
    from headrace.engine.resolve import find_source, resolve_config
    from headrace.worker.profile import limits_now
    from headrace.worker.settings import resolve_dtype

    if config.device.executor != "model":
        return {"findings": [], "unmeasured": 0.0}
    spec = families.spec_from_config(find_source(config).config)
    dtype = resolve_dtype(config.model.dtype, spec.checkpoint_dtype, device)[0]
    tokens = resolve_config(config, device)[0].scheduler
    assert tokens.max_num_batched_tokens is not None, "resolved"
    bench = ShapeBench(spec, dtype, torch.device(device), tokens.max_num_batched_tokens)
    findings, unmeasured = advise(bench, limits_now(device), thorough=thorough)
    return {"findings": [asdict(each) | {"cost": each.cost} for each in findings], "unmeasured": unmeasured}


def _account(engine: Engine, bookkeeping: int) -> dict[str, Any]:
    """Resident memory by purpose, after the largest step; ``bookkeeping``: bytes used by the scheduler and its
    pools."""
    from headrace.worker.residency import create_ledger, peak_memory, resident_memory, touched_memory

    info = engine.info
    touched, before = sum(touched_memory(info.memory).values()), resident_memory()[0]
    with peak_memory() as peak:
        step = _take_largest_step(engine)
    grown = resident_memory()[0] - before - (sum(touched_memory(info.memory).values()) - touched)
    measured = {
        "scheduler, block pool and prefix tree": bookkeeping,
        f"kept by kernels and allocator after {step}": grown,
    }
    return _memory_facts(create_ledger(info.memory, measured), step, peak.held)


def _account_gpu(engine: Engine) -> dict[str, Any]:
    """Memory in use on the card by purpose, after the largest step."""
    import torch

    from headrace.worker.device_memory import device_use, measured_peak
    from headrace.worker.residency import Ledger

    device = torch.device("cuda")
    with measured_peak(device, emptied=False) as grown:
        step = _take_largest_step(engine)
    pinned = int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
    return _memory_facts(Ledger(device_use(device).used, engine.info.memory), step, grown.live) | {
        "pinned host memory": pinned
    }


def _take_largest_step(engine: Engine) -> str:
    """Returns a description of it."""
    from headrace.bench.driver import drive
    from headrace.planner.workload.conversations import random_conversations
    from headrace.planner.workload.load import Lengths

    length = min(engine.core.scheduler.limits.max_num_batched_tokens, engine.info.max_sequence_tokens - 1)
    drive(engine.core, random_conversations(1, Lengths(length, 2), vocab_size=engine.info.vocab_size))
    return f"a step of {length} tokens"


def _memory_facts(ledger: Ledger, step: str, peak: int) -> dict[str, Any]:
    return {
        "resident": ledger.resident,
        "purposes": dict(ledger.purposes),
        "residual": ledger.residual,
        "share explained": ledger.share_explained,
        f"peak of {step}": peak,
    }


def render(report: Mapping[str, Any]) -> str:
    parts = [_section("Found", report["found"]), _section("Profile", report["profile"])]
    if "engine" in report:
        rows = [[decision["name"], decision["value"], decision["reason"]] for decision in report["decisions"]]
        parts += [_section("Engine", report["engine"]), "Chosen\n" + _indent(table(("what", "value", "why"), rows))]
        parts.append("Memory\n" + _indent(_render_memory(report)))
    if "drafts" in report:
        columns = ("target on", "draft on", "tokens", "tokens/s", "why not")
        parts.append(
            "Drafts\n" + _indent("\n".join((*report["drafts"]["said"], table(columns, report["drafts"]["rows"]))))
        )
    if "problem" in report:
        parts.append(f"Problem\n  {report['problem']}")
    if "batch" in report:
        parts.append("Batch\n" + _indent("\n".join(report["batch"]["said"])))
    if "shape" in report:
        parts.append("Shape\n" + _indent(_render_shape(report["shape"])))
    return "\n\n".join(parts)


def _section(title: str, facts: Mapping[str, Any]) -> str:
    width = max(map(len, facts))
    return f"{title}\n" + "\n".join(f"  {name:<{width}}  {value}" for name, value in facts.items())


def _render_memory(report: Mapping[str, Any]) -> str:
    """Announced sizes, then actual ones, by purpose, with the residual. On a GPU, purposes are as announced."""
    announced = [
        [f"reserved for {name}", _mib(size)]
        for name, size in report["announced"].items()
        if name not in ("process", "kernels")
    ]
    text = table(("announced", "MiB"), announced)
    if "memory" not in report:
        return text
    memory = report["memory"]
    rows = [[name, _mib(size)] for name, size in memory["purposes"].items()]
    rows += [["unexplained", _mib(memory["residual"])], ["in use in total", _mib(memory["resident"])]]
    peaks = [f"{name}: {_mib(size)} MiB above that" for name, size in memory.items() if name.startswith("peak")]
    pinned = [f"{name}: {_mib(size)} MiB" for name, size in memory.items() if name.startswith("pinned")]
    above = [] if "context" in report["announced"] else [text, ""]
    return "\n".join(
        [*above, table(("in use", "MiB"), rows), f"accounted for: {memory['share explained']:.2%}", *peaks, *pinned]
    )


def _render_shape(shape: Mapping[str, Any]) -> str:
    """Dimensions that cost something here, the most expensive first; the others by name."""
    findings = sorted(shape["findings"], key=lambda each: -(each["step"] or 0.0))
    told = [each for each in findings if each["cost"] != "nothing"]
    rows = [[each[name] for name in ("dimension", "tokens", "cost", "better", "why", "remedy")] for each in told]
    lines = [table(("dimension", "tokens", "costs", "compared with", "why", "remedy"), rows)] if rows else []
    if free := dict.fromkeys(each["dimension"] for each in findings if each["cost"] == "nothing"):
        lines.append(f"suspected, but costs nothing measurable here: {'; '.join(free)}")
    if shape["unmeasured"]:
        lines.append(f"measuring takes about {shape['unmeasured']:.0f} s: headrace doctor MODEL --profile does it")
    return "\n".join(lines or ["no dimension of this model is known to cost speed on this device"])


def _mib(size: int) -> float:
    return round(size / 2**20, 1)


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
