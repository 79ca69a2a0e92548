"""The configuration of pools: what is read, what is warned of, and every problem by its path and its words."""

from copy import deepcopy
from typing import Any

import msgspec
import pytest

from kv_protocol.errors import FOUND_CHARACTERS_MAX
from kv_runtime.config.loading import ConfigurationError
from router.pools.config import Axis, Override, PoolsConfig, PoolSettings, RouterAddress, read_config
from tests.support.paths import ROOT

CONFIGS = ROOT / "configs" / "pools"
DISAGG: dict[str, Any] = {
    "mode": "disagg",
    "num_prefill_pools": 2,
    "num_decode_pools": 1,
    "prefill_pool_dynamo_namespaces": ["p0", "p1"],
    "decode_pool_dynamo_namespaces": ["d0"],
    "prefill_pool_selection_strategy": {
        "isl_min": 0, "isl_max": 32000, "isl_resolution": 2,
        "ttft_min_ms": 10, "ttft_max_ms": 3000, "ttft_resolution": 2,
        "prefill_pool_mapping": [[0, 1], [0, 1]],
    },
    "decode_pool_selection_strategy": {
        "context_length_min": 0, "context_length_max": 32000, "context_length_resolution": 2,
        "itl_min_ms": 10, "itl_max_ms": 500, "itl_resolution": 2,
        "decode_pool_mapping": [[0, 0], [0, 0]],
    },
}  # fmt: skip
AGG: dict[str, Any] = {
    "mode": "agg",
    "num_agg_pools": 2,
    "agg_pool_dynamo_namespaces": ["a0", "a1"],
    "agg_pool_selection_strategy": {
        "ttft_min_ms": 0, "ttft_max_ms": 1000, "ttft_resolution": 2,
        "itl_min_ms": 0, "itl_max_ms": 1000, "itl_resolution": 1,
        "agg_pool_mapping": [[0], [1]],
    },
}  # fmt: skip
ABSENT = object()


def changed(base: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    data = deepcopy(base)
    *above, last = path.split("/")
    at: Any = data
    for key in above:
        at = at[int(key) if isinstance(at, list) else key]
    if value is ABSENT:
        del at[last]
    elif isinstance(at, list):
        at[int(last)] = value
    else:
        at[last] = value
    return data


def problems(data: object) -> list[str]:
    with pytest.raises(ConfigurationError) as raised:
        read_config(data)
    assert str(raised.value).splitlines()[1:] == [f"  {problem}" for problem in raised.value.problems]
    return list(raised.value.problems)


P, D, A = "prefill_pool_selection_strategy", "decode_pool_selection_strategy", "agg_pool_selection_strategy"
RULE = {"min_priority": 1, "max_priority": 2, "target_pool": 0}


@pytest.mark.parametrize(
    ("base", "path", "value", "expected"),
    [
        (DISAGG, "mode", "both", "mode: found 'both', allowed 'disagg' or 'agg'"),
        (DISAGG, "enable_priority_retry", 2, "enable_priority_retry: found 2, allowed true or false"),
        (DISAGG, "num_prefill_pools", ABSENT, "num_prefill_pools: missing"),
        (DISAGG, "num_decode_pools", 0, "num_decode_pools: found 0, allowed 1 or more"),
        (DISAGG, "prefill_pool_dynamo_namespaces", ["p0"],
         "prefill_pool_dynamo_namespaces: found 1, allowed 2, as num_prefill_pools says"),
        (AGG, "agg_pool_dynamo_namespaces/1", 7, "agg_pool_dynamo_namespaces.1: found 7, allowed text"),
        (DISAGG, "prefill_pool_priorities", [0],
         "prefill_pool_priorities: found 1, allowed 2, as num_prefill_pools says"),
        (DISAGG, "decode_pool_priorities", ["x"], "decode_pool_priorities.0: found 'x', allowed a whole number"),
        (DISAGG, P, ABSENT, f"{P}: missing"),
        (DISAGG, f"{P}/isl_resolution", 0, f"{P}.isl_resolution: found 0, allowed 1 or more"),
        (DISAGG, f"{P}/isl_min", 32000, f"{P}.isl_min: found 32000, allowed less than isl_max, which is 32000"),
        (DISAGG, f"{P}/ttft_min_ms", 3001,
         f"{P}.ttft_min_ms: found 3001, allowed less than ttft_max_ms, which is 3000"),
        (DISAGG, f"{P}/isl_max", 1.5, f"{P}.isl_max: found 1.5, allowed a whole number"),
        (AGG, f"{A}/itl_max_ms", "x", f"{A}.itl_max_ms: found 'x', allowed a number"),
        (DISAGG, f"{P}/prefill_pool_mapping", [[0, 1]],
         f"{P}.prefill_pool_mapping: found a list of 1, allowed a list of 2, as isl_resolution says"),
        (DISAGG, f"{P}/prefill_pool_mapping/1", [0],
         f"{P}.prefill_pool_mapping.1: found a list of 1, allowed a list of 2, as ttft_resolution says"),
        (DISAGG, f"{P}/prefill_pool_mapping/1/0", 2,
         f"{P}.prefill_pool_mapping.1.0: found 2, allowed a pool's index, 0..1"),
        (DISAGG, f"{P}/priority_overrides", {}, f"{P}.priority_overrides: found {{}}, allowed a list"),
        (DISAGG, f"{P}/priority_overrides", [RULE | {"min_priority": 3}],
         f"{P}.priority_overrides.0: found min_priority=3 max_priority=2 target_pool=0, allowed min <= max, pool 0..1"),
        (DISAGG, f"{D}/priority_overrides", [RULE, RULE | {"target_pool": 1}],
         f"{D}.priority_overrides.1: found min_priority=1 max_priority=2 target_pool=1, allowed min <= max, pool 0..0"),
        (AGG, f"{A}/priority_overrides", [RULE | {"more": 1}],
         f"{A}.priority_overrides.0.more: allowed no such key"),
        (AGG, "agg_pool_dynamo_namespaces/1", "a1\n",
         r"agg_pool_dynamo_namespaces: found ['a0', 'a1\n'], allowed text without control characters"),
        (AGG, "pools", {"namespaces": {"a0": {"routers": [{"url": "http://a\r\nx: y"}]}}},
         r"pools.namespaces.a0.routers.0.url: found 'http://a\r\nx: y', allowed http(s)://host:port"),
        (AGG, "pools", {"namespaces": {"a0": {"routers": [{"url": "ftp://u:hunter2@a"}]}}},
         "pools.namespaces.a0.routers.0.url: allowed http(s)://host:port"),
        (AGG, "pools", {"namespaces": {"a9": {"config": "x"}}},
         "pools.namespaces.a9: found 'a9', allowed a pool's namespace: a0, a1"),
        (AGG, "pools", {"namespaces": {"a0": {"routers": []}}},
         "pools.namespaces.a0: routers: allowed 1 or more, each url once"),
        (AGG, "pools", {"namespaces": {"a0": {"routers": [{"url": "a:1"}]}}},
         "pools.namespaces.a0.routers.0.url: found 'a:1', allowed http(s)://host:port"),
        (AGG, "pools", {"namespaces": {"a0": {"routers": [{"url": "http://a", "control_url": 8}]}}},
         "pools.namespaces.a0.routers.0.control_url: found 8, allowed text"),
        (AGG, "pools", {"namespaces": {"a0": {"routers": [{"url": "http://a"}, {"url": "http://a/"}]}}},
         "pools.namespaces.a0: routers: allowed 1 or more, each url once"),
        (AGG, "pools", {"namespaces": {"a0": {"routers": [{"url": "http://a"}], "config": "x"}}},
         "pools.namespaces.a0: allowed either routers or config"),
        (AGG, "pools", {"namespaces": {"a0": {"routers": [{"url": "http://a", "token": "hunter2"}]}}},
         "pools.namespaces.a0.routers.0.token: allowed no such key"),
        (AGG, f"{A}/agg_pool_mapping/1/0", "x" * 1000,
         f"{A}.agg_pool_mapping.1.0: found '{'x' * (FOUND_CHARACTERS_MAX - 1)}..., allowed a pool's index, 0..1"),
        (AGG, f"{A}/ttft_min_ms", True, f"{A}.ttft_min_ms: found True, allowed a number"),
        (AGG, "num_agg_pools", "2", "num_agg_pools: found '2', allowed a whole number"),
        (AGG, "pools", {"look_period_s": 0}, "pools.look_period_s: found 0, allowed 0.01 or more"),
        (AGG, "pools", {"queue_requests_max": -1},
         "pools.queue_requests_max: found -1, allowed 0 or more"),
    ],
)  # fmt: skip
def test_a_value_that_may_not_be_is_told_by_path_found_and_allowed(
    base: dict[str, Any], path: str, value: object, expected: str
) -> None:
    read_config(base)
    assert expected in problems(changed(base, path, value))


def test_all_problems_are_told_together_and_none_that_is_only_the_echo_of_another() -> None:
    assert len(problems(changed(AGG, f"{A}/itl_min_ms", 1000))) == 1
    data = changed(changed(AGG, f"{A}/itl_resolution", 0), "enable_priority_retry", 2)
    assert [each.partition(":")[0] for each in problems(changed(data, "pools", {"foo": 1}))] == [
        "enable_priority_retry", "pools.foo", f"{A}.itl_resolution",
    ]  # fmt: skip


def test_what_is_no_object_is_refused() -> None:
    assert problems([]) == ["the configuration: found [], allowed a mapping"]


def test_a_length_axis_takes_all_three_keys_or_none() -> None:
    isl = {"isl_min": 0, "isl_max": 10, "isl_resolution": 1}
    three = changed(AGG, A, AGG[A] | isl | {"agg_pool_mapping": [[[0], [1]]]})
    assert [axis.name for axis in read_config(three).groups[0].axes] == ["isl", "ttft_ms", "itl_ms"]
    told = "isl_max: found none, allowed all three of isl_min, isl_max, isl_resolution, or none"
    assert problems(changed(three, f"{A}/isl_max", ABSENT)) == [f"{A}: {told}"]


def test_disagg_is_the_mode_and_priorities_follow_the_pools_where_nothing_is_said() -> None:
    data = changed(DISAGG, "mode", ABSENT)
    config = read_config(data)
    prefill, decode = config.groups
    assert (config.mode, config.retry) == ("disagg", False)
    assert (prefill.priorities, decode.priorities) == ((0, 1), (0,))
    assert prefill.axes == (Axis("isl", 0, 32_000, 2), Axis("ttft_ms", 10.0, 3000.0, 2))
    assert read_config(changed(AGG, "agg_pool_priorities", [3, -1])).groups[0].priorities == (3, -1)


def test_overrides_are_read_in_their_order() -> None:
    rules = [RULE, {"min_priority": -4, "max_priority": -4, "target_pool": 1}]
    group = read_config(changed(AGG, f"{A}/priority_overrides", rules)).groups[0]
    assert group.overrides == tuple(Override.model_validate(rule) for rule in rules)


def test_names_without_units_are_read_with_a_warning_and_the_newer_ones_win() -> None:
    strategy = {key.removesuffix("_ms"): value for key, value in AGG[A].items()}
    config = read_config(changed(AGG, A, strategy))
    assert config.groups == read_config(AGG).groups
    assert config.warnings == tuple(
        f"{A}.{name} is deprecated: use {name}_ms" for name in ("ttft_min", "ttft_max", "itl_min", "itl_max")
    )
    both = read_config(changed(AGG, f"{A}/ttft_min", 500))
    assert both.groups == read_config(AGG).groups
    assert both.warnings == (f"{A}.ttft_min is deprecated: use ttft_min_ms",)


def test_keys_that_are_not_known_or_of_the_other_mode_have_no_effect_and_are_warned_of() -> None:
    config = read_config(changed(AGG, f"{A}/colour", 1) | {"note": "x", "num_prefill_pools": 0, P: {"x": 1}})
    assert config.groups == read_config(AGG).groups
    names = (f"{A}.colour", "note", "num_prefill_pools", P)
    assert config.warnings == tuple(f"{name} has no effect" for name in names)


def test_a_key_without_a_value_is_as_not_given() -> None:
    strategy = AGG[A] | {"priority_overrides": None}
    routers = [{"url": "http://a", "control_url": ""}, {"url": "http://b", "control_url": None}]
    pools = {"namespaces": {"a0": {"routers": routers, "config": None}}}
    config = read_config(AGG | {A: strategy, "enable_priority_retry": None, "pools": pools})
    assert config.groups == read_config(AGG).groups
    assert config.pools["a0"].routers == (RouterAddress(url="http://a"), RouterAddress(url="http://b"))


def test_the_pools_places_and_limits() -> None:
    own = {
        "namespaces": {
            "a0": {"routers": [{"url": "http://a:1/", "control_url": "http://a:2"}], "ttft_bound_ms": 100},
            "a1": {"config": "slow.yaml", "queue_requests_max": 0},
        },
        "queue_requests_max": 8,
        "itl_bound_ms": 50,
        "hold_s": 5,
        "look_period_s": 0.5,
    }
    config = read_config(changed(AGG, "pools", own))
    router = RouterAddress(url="http://a:1", control_url="http://a:2")
    assert config.pools == {
        "a0": PoolSettings(routers=(router,), queue_requests_max=8, ttft_bound_ms=100, itl_bound_ms=50, hold_s=5),
        "a1": PoolSettings(config="slow.yaml", queue_requests_max=None, itl_bound_ms=50, hold_s=5),
    }
    assert config.own.look_period_s == 0.5


def test_places_that_are_given_stand_instead_of_the_files() -> None:
    own = {"namespaces": {"a0": {"config": "fast.yaml", "hold_s": 5}}}
    given = PoolSettings(routers=(RouterAddress(url="http://b:1"),))
    config = read_config(changed(AGG, "pools", own), {"a0": given})
    assert config.pools["a0"] == PoolSettings(routers=given.routers, hold_s=5)
    with pytest.raises(ConfigurationError, match=r"namespaces\.x: found 'x', allowed a pool's namespace: a0, a1"):
        read_config(AGG, {"x": given})


def sample(name: str) -> PoolsConfig:
    return read_config(msgspec.json.decode((CONFIGS / name).read_bytes()))


def test_the_peers_samples_read_as_they_are() -> None:
    agg, disagg = sample("local-agg.json"), sample("disagg-2p1d.json")
    assert agg.groups[0].mapping == [[0], [1]]
    assert [(group.phase, len(group.namespaces), group.mapping) for group in disagg.groups] == [
        ("prefill", 2, [[0, 1], [0, 1]]),
        ("decode", 1, [[0, 0], [0, 0]]),
    ]


def test_every_sample_loads() -> None:
    for file in CONFIGS.glob("*.json"):
        assert sample(file.name).groups
    live = sample("live-agg.json")
    assert live.warnings == ()
