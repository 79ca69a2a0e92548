"""This router's own keys in the configuration of pools: the pools' addresses and limits.

| key | means |
|---|---|
| `namespaces` | of each: its `routers`, or `config`, the file of a router in this process; and limits of its own |
| `routers` | a list of `url` (data plane) and `control_url` (control plane, for queue and latencies) |
| `look_period_s`, `look_timeout_s` | how often routers are looked at, and how long one may take to answer |
| `characters_per_token` | bytes of text that are taken for a token where there is no tokenizer |
| those of `LiveLimits` | when a pool is passed over; here for all, in a namespace for that one |
"""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from router.pools.json_values import ConfigObject, Words
from router.pools.probes import LiveLimits

ROUTERS_MAX = 16


class RouterAddress(msgspec.Struct, frozen=True):
    """The address of a pool's router: its data plane, and its control plane (empty: not probed)."""

    url: str
    control_url: str = ""


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's routers, or the configuration file of one in this process; neither: not configured yet."""

    routers: tuple[RouterAddress, ...] = ()
    config: str = ""
    limits: LiveLimits = LiveLimits()


class Own(msgspec.Struct, frozen=True, kw_only=True):
    """The object `pools` of the configuration; its field `pools` has every namespace, also unnamed ones."""

    pools: dict[str, PoolSettings]
    look_period_s: float
    look_timeout_s: float
    characters_per_token: float


def read_own(top: ConfigObject, names: Sequence[str], given: Mapping[str, PoolSettings]) -> Own:
    """Return the object `pools` for pools of these names; `given` pools replace those of the configuration."""
    own = top.within("pools", required=False) or ConfigObject({}, "pools", top.problems, top.warnings)
    limits = _limits(own, LiveLimits())
    configured = _pools_of_namespaces(own, limits)
    read = Own(
        pools={name: _merged(configured.get(name), given.get(name), limits) for name in names if name},
        look_period_s=own.number("look_period_s", 0.01, 3600, 1.0),
        look_timeout_s=own.number("look_timeout_s", 0.01, 60, 2.0),
        characters_per_token=own.number("characters_per_token", 0.1, 100, 4.0),
    )
    own.refuse_others()
    for name in sorted({*configured, *given} - {*names}):
        top.problem_at(f"pools.namespaces.{name}", name, f"a pool's namespace: {', '.join(dict.fromkeys(names))}")
    return read


def _merged(configured: PoolSettings | None, given: PoolSettings | None, limits: LiveLimits) -> PoolSettings:
    limits = configured.limits if configured else limits
    return replace(given or configured or PoolSettings(), limits=limits)


def _pools_of_namespaces(own: ConfigObject, limits: LiveLimits) -> dict[str, PoolSettings]:
    namespaces = own.within("namespaces", required=False)
    if namespaces is None:
        return {}
    pools = {}
    for name in namespaces.unread():
        pool = namespaces.within(name)
        if pool is not None:
            pools[name] = _pool(pool, limits)
    return pools


def _pool(pool: ConfigObject, limits: LiveLimits) -> PoolSettings:
    has_routers, has_config = pool.has("routers"), pool.has("config")
    if has_routers and has_config:
        pool.problem("config", pool.value("config"), "either routers or config")
    config = pool.value("config") or ""
    if not isinstance(config, str):
        pool.problem("config", config, "a file's name")
    read = PoolSettings(
        routers=_routers(pool) if has_routers else (),
        config=str(config),
        limits=_limits(pool, limits),
    )
    pool.value("routers")
    pool.refuse_others()
    return read


def _routers(pool: ConfigObject) -> tuple[RouterAddress, ...]:
    allowed = f"a list of 1..{ROUTERS_MAX} objects with url and perhaps control_url"
    found = pool.items("routers", allowed)
    if not 0 < len(found) <= ROUTERS_MAX and isinstance(pool.value("routers"), list):
        pool.problem("routers", Words(f"{len(found)} routers"), allowed)
    routers = []
    for index, each in enumerate(found):
        address = pool.inner(each, pool.at(f"routers[{index}]"))
        if address is not None:
            routers.append(RouterAddress(_url(address, "url"), _url(address, "control_url", required=False)))
            address.refuse_others()
    if len({each.url for each in routers}) != len(routers):
        pool.problem("routers", Words("an url twice"), "each url once")
    return tuple(routers)


def _url(address: ConfigObject, key: str, *, required: bool = True) -> str:
    found = address.value(key)
    if found is None and not required:
        return ""
    if not is_url(found):
        found = Words("an address with a user") if "@" in str(found) else found
        address.problem(key, found, "http(s)://host:port")
        return ""
    return str(found).rstrip("/")


def is_url(found: object) -> bool:
    """Return whether it looks like a router's address, which becomes a part of heads: without spaces and controls."""
    scheme, separator, rest = found.partition("://") if isinstance(found, str) else ("", "", "")
    is_plain = rest.isascii() and rest.isprintable() and " " not in rest
    return bool(separator) and scheme in ("http", "https") and bool(rest.strip("/")) and is_plain


def _limits(found: ConfigObject, common: LiveLimits) -> LiveLimits:
    """Return the given limits, the others from `common`; a bound of 0 means that it is not checked."""
    ttft, itl = (_bound_ms(found, key, getattr(common, key)) for key in ("ttft_bound_ms", "itl_bound_ms"))
    problems_before = len(found.problems)
    least = found.number("attainment_min_ratio", 0, 1, common.attainment_min_ratio)
    release = found.number("attainment_release_ratio", 0, 1, max(least, common.attainment_release_ratio))
    if len(found.problems) == problems_before and release < least:
        found.problem("attainment_release_ratio", release, f"attainment_min_ratio at least, which is {least:g}")
    queue = found.integer("queue_requests_max", 0, 1 << 30, common.queue_requests_max or 0)
    return LiveLimits(
        failures_max=found.integer("failures_max", 1, 100, common.failures_max),
        successes_min=found.integer("successes_min", 1, 100, common.successes_min),
        queue_requests_max=queue or None,
        queue_release_ratio=found.number("queue_release_ratio", 0, 1, common.queue_release_ratio),
        ttft_bound_ms=ttft,
        itl_bound_ms=itl,
        attainment_min_ratio=least,
        attainment_release_ratio=release,
        window_requests_min=found.integer("window_requests_min", 1, 1_000_000, common.window_requests_min),
        hold_s=found.number("hold_s", 0.1, 86_400, common.hold_s),
    )


def _bound_ms(found: ConfigObject, key: str, common: float | None) -> float | None:
    return found.number(key, 0, 3.6e6, common or 0.0) or None
