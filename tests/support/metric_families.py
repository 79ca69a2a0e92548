"""The metric families of every command, made by the functions that make them at a scrape.

`COMMANDS` lists them as each process registers them. The statistics that they are made from are `NOTHING`: every
family is there, with its labels, and has no samples. `tests/system/e2e/test_metrics_are_documented.py` compares the
lists with what real processes show.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from indexer.service.metrics import index_families, keeper_families
from kv_runtime.event_log import log_families
from kv_runtime.http.connection_limit import connection_families
from kv_runtime.nats_server import nats_server_families
from kv_runtime.telemetry import PREFIX, LoopLag
from kv_runtime.tracing.exporter import span_families
from router.attached_workers import AttachedWorkers
from router.attribution.report import AttributionLimits
from router.attribution.service import savings_families
from router.drain.handover import Handover
from router.journal.log import journal_families
from router.live.service import LiveClients, Ring, live_families
from router.metrics.request import RequestMetrics
from router.metrics.state import (
    PickerStatistics,
    http_families,
    picker_families,
    prompt_families,
    rank_families,
    state_families,
)
from router.native import built
from router.planner.service import planner_families
from router.pools.watch import PoolMetrics
from router.processes.metrics import process_families
from router.prompt.engine_parity import EngineParity
from router.replicas.service import Replicas, replica_families
from router.shadows.service import Budget, shadow_families
from tests.unit.router.test_routing import Bench
from worker_agent.attached.metrics import attach_families
from worker_agent.commands.served_media import asking_families, encode_families, media_families
from worker_agent.commands.served_metrics import served_families, transfer_families
from worker_agent.events.metrics import consolidator_families
from worker_agent.fleet.membership import Membership
from worker_agent.metrics import (
    agent_families,
    drain_families,
    engine_event_families,
    load_families,
    row_families,
    thread_family,
)


class _Nothing(float):
    """The number 0, a call without effect and an empty collection; each of its attributes is the same."""

    def __getattr__(self, name: str) -> Self:
        return self

    def __call__(self, *_: object) -> Self:
        return self

    def __iter__(self) -> Iterator[Self]:
        return iter(())

    def __getitem__(self, _: object) -> Self:
        return self

    def __len__(self) -> int:
        return 0

    def __ror__(self, left: Any) -> Any:
        return left


NOTHING: Any = _Nothing()


class MadeFamily(NamedTuple):
    """A metric family, and the module that makes it."""

    module: str
    """Path of the module from the root of the repository."""
    name: str
    """Name of its samples, without the endings of histograms and summaries."""
    kind: str
    labels: tuple[str, ...]
    meaning: str


def _families_of(maker: Callable[..., object], families: Iterable[Metric]) -> Iterator[MadeFamily]:
    module = f"{maker.__module__.replace('.', '/')}.py"
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield MadeFamily(module, name, family.type, getattr(family, "labels", ()), family.documentation)


def _of_function(make: Callable[..., Iterable[Metric]], arguments: int = 1) -> Iterator[MadeFamily]:
    return _families_of(make, make(*(NOTHING,) * arguments))


def _of_object(metrics: Any) -> Iterator[MadeFamily]:
    return _families_of(type(metrics), metrics.families())


def _loop_lag() -> Iterator[MadeFamily]:
    registry = CollectorRegistry()
    LoopLag(registry, NOTHING)
    return _families_of(LoopLag, registry.collect())


def _server() -> Iterator[MadeFamily]:
    return _of_function(connection_families, 2)


def _log() -> Iterator[MadeFamily]:
    return _of_function(log_families)


def _spans() -> Iterator[MadeFamily]:
    return _families_of(span_families, span_families(None))


def _index() -> Iterator[MadeFamily]:
    yield from _of_function(index_families, 2)
    yield from _of_function(keeper_families)
    yield from _log()


def _router() -> Iterator[MadeFamily]:
    yield from (*_server(), *_loop_lag(), *_index())
    routing = Bench().routing
    yield from _of_object(RequestMetrics(CollectorRegistry(), routing))
    for make in (rank_families, http_families, prompt_families):
        yield from _of_function(make)
    yield from _of_function(state_families, 3)
    yield from _families_of(planner_families, planner_families([]))
    yield from _families_of(shadow_families, shadow_families([], Budget(0.0)))
    yield from _families_of(savings_families, savings_families(built.Attribution(*AttributionLimits())))
    yield from _of_object(Handover(NOTHING, NOTHING, NOTHING, NOTHING))
    yield from _of_object(EngineParity(NOTHING, NOTHING, NOTHING, NOTHING))
    yield from _of_object(AttachedWorkers(NOTHING, NOTHING, NOTHING, {}, NOTHING))
    yield from _of_function(journal_families)
    replicas = Replicas(NOTHING, NOTHING, "")
    yield from _families_of(replica_families, replica_families(replicas))
    yield from _of_function(process_families, 2)
    yield from _families_of(nats_server_families, nats_server_families(None))
    yield from _families_of(picker_families, picker_families(PickerStatistics()))
    yield from _spans()
    yield from _families_of(live_families, live_families(LiveClients(), Ring(1)))


def _pools() -> Iterator[MadeFamily]:
    yield from (*_server(), *_loop_lag())
    yield from _of_object(PoolMetrics((), NOTHING))
    yield from _of_function(http_families)
    yield from _of_function(prompt_families)


def _serve() -> Iterator[MadeFamily]:
    yield from (*_server(), *_loop_lag(), *_log())
    yield from _families_of(consolidator_families, consolidator_families(()))
    yield from _of_function(agent_families, 5)
    yield from _of_function(transfer_families, 2)
    yield from _of_function(served_families, 3)
    yield from _of_function(media_families, 2)
    yield from _families_of(asking_families, asking_families("", {}))
    yield from _of_function(encode_families, 4)
    yield from _of_object(Membership(NOTHING, NOTHING, NOTHING, NOTHING))
    yield from _spans()


def _attach() -> Iterator[MadeFamily]:
    yield from (*_server(), *_log())
    yield from _families_of(consolidator_families, consolidator_families(()))
    for make, arguments in ((engine_event_families, 2), (drain_families, 2), (load_families, 2), (row_families, 2)):
        yield from _of_function(make, arguments)
    yield from _families_of(thread_family, [thread_family("", {})])
    yield from _of_function(attach_families, 6)
    yield from _of_object(Membership(NOTHING, NOTHING, NOTHING, NOTHING))
    yield from _spans()


def _each_once(families: Iterable[MadeFamily]) -> dict[str, MadeFamily]:
    """Return the families by name: a family that a larger one includes is of the first, its own, module."""
    found: dict[str, MadeFamily] = {}
    for family in families:
        found.setdefault(family.name, family)
    return found


def shown_families(exposition: str) -> set[str]:
    """Return the names of the families in what a process answers at `/metrics`."""
    lines = [line.split() for line in exposition.splitlines() if line.startswith(f"# TYPE {PREFIX}")]
    return {name if kind != "counter" or name.endswith("_total") else f"{name}_total" for _, _, name, kind in lines}


COMMANDS = {
    "router": _each_once(_router()),
    "router pools": _each_once(_pools()),
    "indexer serve": _each_once((*_server(), *_index(), *_spans())),
    "worker-agent serve": _each_once(_serve()),
    "worker-agent attach": _each_once(_attach()),
}
"""By command, the families that its process may show, by name; some only where a setting asks for what they count."""
