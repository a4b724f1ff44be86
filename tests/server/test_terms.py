"""What a request says besides its prompt, for scheduling policies: who asks, and what its reader expects."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import EngineConfig, SchedulerConfig, ServerConfig
from headrace.errors import ConfigError, InvalidRequest
from headrace.request import Expectations
from headrace.server.dialects.body import MAX_USER, GeneratingBody, GenerationRequest, asked
from headrace.server.generate import _check_policy
from headrace.server.limits import Guard, check_operators, check_weights, tenant_of
from headrace.server.service import Service


def request(**body: Any) -> GenerationRequest[GeneratingBody]:
    return GenerationRequest(**asked(GeneratingBody.read(body), {}))


def service(policy: str = "fcfs", **config: Any) -> Service:
    engine = EngineConfig(scheduler=SchedulerConfig(scheduling_policy=policy))
    return Service(ServerConfig(**config), "0", [], engine_config=engine)


def test_keys_have_names_that_tell_nothing_of_them() -> None:
    guard = Guard(ServerConfig(api_key=("secret-a", "secret-b", "secret-a")))
    names = [
        guard.key_names[guard.check_key([(b"authorization", b"Bearer " + key)])] for key in (b"secret-a", b"secret-b")
    ]
    assert names == ["key1", "key2"]
    assert Guard(ServerConfig()).key_names == {}


@pytest.mark.parametrize(
    ("by", "keys", "expected"),
    [
        ("auto", (), "ann"),
        ("auto", ("a",), "ann"),
        ("auto", ("a", "b"), "key2"),
        ("key", (), ""),
        ("key", ("a", "b"), "key2"),
        ("user", ("a",), "ann"),
        ("user", ("a", "b"), "key2/ann"),
    ],
)
def test_who_is_a_tenant(by: str, keys: tuple[str, ...], expected: str) -> None:
    assert tenant_of(ServerConfig(tenant_by=by, api_key=keys), "key2" if keys else "", "ann") == expected


def test_weights_that_would_change_nothing_are_refused() -> None:
    two = ServerConfig(api_key=("a", "b"))
    check_weights(SchedulerConfig(scheduling_policy="fair", tenant_weight=("key2=3",)), two)
    check_weights(SchedulerConfig(scheduling_policy="fair", tenant_weight=("ann=3",)), ServerConfig())
    check_weights(SchedulerConfig(), two)
    with pytest.raises(ConfigError, match=r"'ann', but tenants are API keys here .key1 to key2"):
        check_weights(SchedulerConfig(scheduling_policy="fair", tenant_weight=("ann=3",)), two)
    with pytest.raises(ConfigError, match="none is set"):
        check_weights(
            SchedulerConfig(scheduling_policy="fair", tenant_weight=("key1=3",)), ServerConfig(tenant_by="key")
        )
    with pytest.raises(ConfigError, match="--scheduling-policy is qoe"):
        check_weights(SchedulerConfig(scheduling_policy="qoe", tenant_weight=("key1=3",)), two)


def test_users_are_named_by_either_api() -> None:
    assert request(user="ann").body.user_name == request(metadata={"user_id": "ann"}).body.user_name == "ann"
    assert (
        request().body.user_name
        == request(metadata={"user_id": 5}).body.user_name
        == request(metadata={}).body.user_name
        == ""
    )
    assert len(request(user="x" * 4000).body.user_name) == MAX_USER


def test_expectations_are_read_and_wrong_ones_named_as_they_were_written() -> None:
    assert request(expected_ttft=2, expected_tpot=0.1, reading_speed=8).expects == Expectations(
        ttft=2, tpot=0.1, reading_speed=8
    )
    for name in ("expected_ttft", "expected_tpot", "reading_speed"):
        for value in (0, -1, float("nan"), float("inf"), 10**300):
            with pytest.raises(InvalidRequest, match=f"^{name} is") as caught:
                request(**{name: value})
            assert caught.value.param == name


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "shortest-remaining"])
def test_expectations_that_nobody_heeds_are_refused(policy: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^reading_speed needs .* --scheduling-policy qoe or deadline") as caught:
        _check_policy(service(policy), request(reading_speed=8))
    assert caught.value.param == "reading_speed"
    _check_policy(service(policy), request(user="ann"))


@pytest.mark.parametrize("policy", ["qoe", "deadline"])
def test_expectations_that_are_heeded_pass(policy: str) -> None:
    _check_policy(service(policy), request(expected_ttft=2.0))


def test_an_operator_is_named_by_the_place_of_its_key() -> None:
    check_operators(ServerConfig(api_key=("a", "b"), operator_key=("key2",)))
    with pytest.raises(ConfigError, match=r"'key3', which is no key \(key1 to key2 in the order of --api-key\)"):
        check_operators(ServerConfig(api_key=("a", "b"), operator_key=("key3",)))
    with pytest.raises(ConfigError, match="none is set"):
        check_operators(ServerConfig(operator_key=("key1",)))
