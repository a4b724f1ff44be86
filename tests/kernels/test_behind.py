"""Who serves what a candidate leaves: those after it in the list, as if it were not there, with their switches and
their failures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import headrace.kernels as registry
from headrace.errors import ConfigError
from headrace.kernels import Kernels, StrictKernelError
from headrace.kernels.candidate import CallSite, Candidate, Declined, Sizes
from headrace.kernels.linear import reference
from headrace.worker.worker import kernel_decisions
from tests.support.kernel_cases import called, carried_out, using

CPU = torch.device("cpu")
SIZES = Sizes(None, torch.float32, 16, 64, 4, 64)  # type: ignore[arg-type]
FACTS: dict[str, Any] = {"dtype": torch.float32, "in_features": 3, "out_features": 2}
WEIGHT = torch.arange(6.0).view(2, 3)
FEW, MANY = torch.ones(1, 3), torch.ones(5, 3)


class DoesNotBuild(Exception):
    pass


def judge(error: Exception) -> str | None:
    return str(error) if isinstance(error, DoesNotBuild) else None


class Layer:
    """Answers with its name; for more rows than it serves, with what stands behind it says."""

    def __init__(self, name: str, broken: Exception | None = None, behind: Callable[..., Any] | None = None) -> None:
        self.name, self.broken, self.behind = name, broken, behind

    def __call__(self, x: torch.Tensor) -> Any:
        if self.behind is not None and len(x) > 1:
            return self.behind(x)
        if self.broken is not None:
            raise self.broken
        return self.name


def warm_up(site: CallSite[Any], run: Callable[..., Any], sizes: Sizes) -> list[tuple[str, Callable[[], object]]]:
    return [(run(WEIGHT, None).name, lambda: run(WEIGHT, None)(FEW))]


def few(broken: Exception | None = None, *, invariant: bool = True) -> Candidate:
    """Serves one row."""

    def create(site: CallSite[Any]) -> Callable[..., Any]:
        behind = site.behind()
        return lambda weight, bias: Layer("few", broken, behind(weight, bias))

    return Candidate("few", create, varies=not invariant, failure=judge, warm_up=warm_up)


def whole(
    name: str, *, declines: Declined | None = None, broken: Exception | None = None, invariant: bool = True
) -> Candidate:
    return Candidate(
        name,
        lambda site: declines or (lambda weight, bias: Layer(name, broken)),
        varies=not invariant,
        failure=judge,
        warm_up=warm_up,
    )


def chosen(
    monkeypatch: pytest.MonkeyPatch, *candidates: Candidate[Any], **settings: Any
) -> tuple[Kernels, Callable[[torch.Tensor], Any]]:
    monkeypatch.setattr(registry, "OPERATIONS", carried_out("linear", *candidates))
    kernels = Kernels(CPU, **settings)
    return kernels, kernels.choose(*called("linear", **FACTS))(WEIGHT, None)


def said(kernels: Kernels) -> list[tuple[str | None, str, tuple[tuple[str, str], ...]]]:
    return [(choice.behind, choice.chosen, choice.declined) for choice in kernels.choices]


def test_the_next_candidate_serves_what_the_first_leaves_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, linear = chosen(monkeypatch, few(), whole("second"), whole("third"))
    assert (linear(FEW), linear(MANY)) == ("few", "second")
    assert said(kernels) == [("few", "second", ()), (None, "few", ())]
    kernels.choose(*called("linear", **FACTS))
    assert len(kernels.choices) == 2
    assert [(each.name, each.value) for each in kernel_decisions(kernels)] == [
        ("kernel linear, what few leaves", "second"), ("kernel linear", "few")
    ]  # fmt: skip


def test_those_that_decline_or_are_disabled_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = (few(), whole("second"), whole("third", declines=Declined("not today")), whole("fourth"))
    kernels, linear = chosen(monkeypatch, *candidates, disabled=frozenset({"second"}))
    assert linear(MANY) == "fourth"
    assert said(kernels)[0] == ("few", "fourth", (("second", "disabled by configuration"), ("third", "not today")))


def test_behind_everybody_stands_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    _, linear = chosen(monkeypatch, few(), whole("second"), disabled=frozenset({"second"}))
    assert linear(FEW) == "few"
    assert torch.equal(linear(MANY), reference.linear(WEIGHT, None)(MANY))


def test_who_is_disabled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, linear = chosen(monkeypatch, few(), whole("second"), disabled=frozenset({"few"}))
    assert linear(FEW) == linear(MANY) == "second"
    assert said(kernels) == [(None, "second", (("few", "disabled by configuration"),))]


def test_two_that_serve_a_part_stand_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(site: CallSite[Any]) -> Callable[..., Any]:
        behind = site.behind()
        return lambda weight, bias: Layer("none", None, behind(weight, bias))

    kernels, linear = chosen(monkeypatch, Candidate("none", create), few(), whole("last"))
    assert linear(MANY) == "last"
    assert [(choice.behind, choice.chosen) for choice in kernels.choices] == [
        ("few", "last"),
        ("none", "few"),
        (None, "none"),
    ]


def test_batch_invariance_holds_behind_too(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, linear = chosen(
        monkeypatch, few(), whole("varies", invariant=False), whole("same"), techniques=using(batch_invariant=True)
    )
    assert linear(MANY) == "same" and said(kernels)[0][2] == (
        ("varies", "its sums depend on what else is in the batch"),
    )
    with pytest.raises(ConfigError, match="No batch-invariant kernel for linear"):
        chosen(monkeypatch, few(), whole("varies", invariant=False), techniques=using(batch_invariant=True))


def test_strict_minds_a_twin_for_a_part_as_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for optional in (True, False):
        refusal = replace(whole("second", declines=Declined("no compiler")), optional=optional)
        if optional:
            assert chosen(monkeypatch, few(), refusal, strict=True)[1](FEW) == "few"
        else:
            with pytest.raises(StrictKernelError, match="second: no compiler"):
                chosen(monkeypatch, few(), refusal, strict=True)


def test_a_kernel_behind_that_does_not_build_gives_way_and_the_first_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels, linear = chosen(monkeypatch, few(), whole("second", broken=DoesNotBuild("no")), whole("third"))
    assert [linear(MANY), linear(FEW), linear(MANY)] == ["third", "few", "third"]
    assert said(kernels) == [("few", "third", (("second", "did not compile: no"),)), (None, "few", ())]
    assert caplog.text.count("kernel second of linear does not compile here: no; third runs instead") == 1


def test_a_first_that_does_not_build_leaves_everything_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, linear = chosen(monkeypatch, few(DoesNotBuild("no")), whole("second"))
    assert [linear(MANY), linear(FEW), linear(MANY)] == ["second"] * 3
    assert said(kernels)[-1] == (None, "second", (("few", "did not compile: no"),))


def test_strict_does_not_let_what_stands_behind_give_way_to_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, linear = chosen(monkeypatch, few(), whole("second", broken=DoesNotBuild("no")), strict=True)
    for _ in range(2):
        with pytest.raises(StrictKernelError, match="second: did not compile: no"):
            linear(MANY)
    assert linear(FEW) == "few" and [choice.chosen for choice in kernels.choices] == ["second", "few"]


def test_other_errors_behind_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, linear = chosen(monkeypatch, few(), whole("second", broken=KeyError("x")))
    with pytest.raises(KeyError):
        linear(MANY)
    assert [choice.chosen for choice in kernels.choices] == ["second", "few"]


def test_what_stands_behind_is_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, _ = chosen(monkeypatch, few(), whole("second", broken=DoesNotBuild("no")), whole("third"))
    warm_ups = list(kernels.warm_ups(SIZES))
    assert [each.name for each in warm_ups] == ["linear torch.float32: second", "linear torch.float32: few"]
    for each in warm_ups:
        each.run()
    assert [choice.chosen for choice in kernels.choices] == ["third", "few"]
    assert list(kernels.warm_ups(SIZES, since=2)) == []


def test_it_is_asked_for_from_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate may ask when it is first called, in a thread that builds kernels."""
    asked: list[Callable[[], Any]] = []

    def create(site: CallSite[Any]) -> Callable[..., Any]:
        asked.append(site.behind)
        return lambda weight, bias: Layer("lazy")

    kernels, _ = chosen(monkeypatch, Candidate("lazy", create), whole("second"))
    assert len(kernels.choices) == 1
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(asked[0]())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernels.choices) == 2 and len(set(map(id, found))) == 1


def test_a_site_without_a_registry_says_so() -> None:
    with pytest.raises(LookupError, match="not made by the registry"):
        CallSite("linear", CPU, called("linear", **FACTS)[1]).behind()
