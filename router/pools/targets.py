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
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace
from pydantic import AfterValidator, Field, model_validator

from kv_runtime.config.sections import Section
from router.pools.probes import LiveLimits

_LIMITS = LiveLimits()
Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
"""Of JSON: neither text nor true is one."""


class RouterAddress(msgspec.Struct, frozen=True):
    """The address of a pool's router: its data plane, and its control plane (empty: not probed)."""

    url: str
    control_url: str = ""


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's routers, or the configuration file of one in this process; neither: not configured yet."""

    routers: tuple[RouterAddress, ...] = ()
    config: str = ""
    limits: LiveLimits = LiveLimits()


def is_url(found: object) -> bool:
    """Return whether it looks like a router's address, which becomes a part of heads: without spaces and controls."""
    scheme, separator, rest = found.partition("://") if isinstance(found, str) else ("", "", "")
    is_plain = rest.isascii() and rest.isprintable() and " " not in rest
    return bool(separator) and scheme in ("http", "https") and bool(rest.strip("/")) and is_plain


def _address(found: str) -> str:
    if not is_url(found):
        raise ValueError("allowed http(s)://host:port")
    return found.rstrip("/")


Address = Annotated[str, AfterValidator(_address)]


class _AddressSection(Section):
    url: Address
    control_url: Annotated[str, AfterValidator(lambda found: found and _address(found))] = ""


class _LimitsSection(Section):
    """Fields of `LiveLimits`; a bound of 0 is not checked."""

    failures_max: Whole = Field(_LIMITS.failures_max, ge=1, le=100)
    successes_min: Whole = Field(_LIMITS.successes_min, ge=1, le=100)
    queue_requests_max: Whole = Field(_LIMITS.queue_requests_max or 0, ge=0, le=1 << 30)
    queue_release_ratio: Number = Field(_LIMITS.queue_release_ratio, ge=0, le=1)
    ttft_bound_ms: Number = Field(0.0, ge=0, le=3.6e6)
    itl_bound_ms: Number = Field(0.0, ge=0, le=3.6e6)
    attainment_min_ratio: Number = Field(_LIMITS.attainment_min_ratio, ge=0, le=1)
    attainment_release_ratio: Number = Field(_LIMITS.attainment_release_ratio, ge=0, le=1)
    window_requests_min: Whole = Field(_LIMITS.window_requests_min, ge=1, le=1_000_000)
    hold_s: Number = Field(_LIMITS.hold_s, ge=0.1, le=86_400)

    def limits(self, common: LiveLimits, path: str, problems: list[str]) -> LiveLimits:
        """Return the given limits, the others from `common`."""
        given: dict[str, Any] = self.model_dump(include=set(LiveLimits.__struct_fields__), exclude_unset=True)
        for bound in ("queue_requests_max", "ttft_bound_ms", "itl_bound_ms"):
            if bound in given:
                given[bound] = given[bound] or None
        found = replace(common, **given)
        least, release = found.attainment_min_ratio, found.attainment_release_ratio
        if release < least and "attainment_release_ratio" in given:
            words = f"found {release:g}, allowed attainment_min_ratio at least, which is {least:g}"
            problems.append(f"{path}.attainment_release_ratio: {words}")
        return replace(found, attainment_release_ratio=max(least, release))


class _PoolSection(_LimitsSection):
    routers: tuple[_AddressSection, ...] = Field((), max_length=16)
    config: str = ""

    @model_validator(mode="after")
    def _is_in_one_place(self) -> "_PoolSection":
        if self.routers and self.config:
            raise ValueError("allowed either routers or config")
        urls = {each.url for each in self.routers}
        if len(urls) < max(len(self.routers), "routers" in self.model_fields_set):
            raise ValueError("routers: allowed 1 or more, each url once")
        return self


class OwnSection(_LimitsSection):
    """The object `pools`."""

    namespaces: dict[str, _PoolSection] = Field({})
    look_period_s: Number = Field(1.0, ge=0.01, le=3600)
    look_timeout_s: Number = Field(2.0, ge=0.01, le=60)
    characters_per_token: Number = Field(4.0, ge=0.1, le=100)

    def settings(
        self, names: Sequence[str], given: Mapping[str, PoolSettings], problems: list[str]
    ) -> dict[str, PoolSettings]:
        """Return the pools of these names; `given` pools replace those of the configuration, but for their limits."""
        common, allowed = self.limits(_LIMITS, "pools", problems), ", ".join(dict.fromkeys(names))
        others = sorted({*self.namespaces, *given} - {*names})
        problems += [
            f"pools.namespaces.{each}: found {each!r}, allowed a pool's namespace: {allowed}" for each in others
        ]
        pools = {}
        for name in names:
            own = self.namespaces.get(name, _PoolSection())
            routers = tuple(RouterAddress(each.url, each.control_url) for each in own.routers)
            pool = given.get(name, PoolSettings(routers=routers, config=own.config))
            pools[name] = replace(pool, limits=own.limits(common, f"pools.namespaces.{name}", problems))
        return pools
