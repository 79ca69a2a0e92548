"""The metric families of every command, as each process registers them.

The statistics that they are made from are `NOTHING`: every family is there, with its labels, and has no samples.
`tests/system/e2e/test_overlap_is_what_the_worker_reuses.py` compares the lists with what real processes show.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from indexer.service.metrics import index_families, snapshot_families
from kv_runtime.event_log import log_families
from kv_runtime.http.server import Connections
from kv_runtime.telemetry import PREFIX, LoopLag
from kv_runtime.text.byte_model import BYTE_MODEL
from kv_runtime.text.loading import load_text
from kv_runtime.tracing.service import span_families
from router.cli.router_parts import RouterParts
from router.config import RouterSettings
from router.decision.policies import MODES
from router.decision.policy import Policy
from router.decision.policy_store import PolicyStore
from router.metrics import http_families, prompt_families
from router.pools.watch import PoolMetrics
from worker_agent.attached.watch import EngineLoads
from worker_agent.attached.worker import AttachedWorker
from worker_agent.commands.serve import media_families, served_families
from worker_agent.events.metrics import consolidator_families
from worker_agent.fleet.membership import Membership
from worker_agent.metrics import (
    agent_families,
    engine_event_families,
    load_families,
    poll_families,
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
    """A metric family."""

    name: str
    """Name of its samples, without the endings of histograms and summaries."""
    kind: str
    labels: tuple[str, ...]
    meaning: str


def _of(make: Callable[..., Iterable[Metric]], arguments: int = 1) -> Iterable[Metric]:
    return make(*(NOTHING,) * arguments)


def _loop_lag() -> Iterable[Metric]:
    registry = CollectorRegistry()
    LoopLag(registry, NOTHING)
    return registry.collect()


def _router() -> Iterator[Metric]:
    settings, text = RouterSettings(), load_text(BYTE_MODEL)
    yield from (*_of(Connections.families, 2), *_loop_lag())
    yield from RouterParts(settings, text, PolicyStore("", Policy(), MODES), NOTHING).registry.collect()


def _pools() -> Iterator[Metric]:
    yield from (*_of(Connections.families, 2), *_loop_lag(), *PoolMetrics((), NOTHING).families())
    yield from (*_of(http_families), *_of(prompt_families))


def _indexer() -> Iterator[Metric]:
    yield from (*_of(Connections.families, 2), *_of(index_families, 2), *_of(snapshot_families), *_of(log_families))
    yield from span_families(None)


def _serve() -> Iterator[Metric]:
    yield from (*_of(Connections.families, 2), *_loop_lag(), *_of(log_families), *consolidator_families(()))
    yield from (*_of(agent_families, 5), *_of(served_families, 3), *media_families("", NOTHING, NOTHING, NOTHING))
    yield from (*Membership(NOTHING, NOTHING, NOTHING).families(), *span_families(None))


def _attach() -> Iterator[Metric]:
    yield from (*_of(Connections.families, 2), *_of(log_families), *consolidator_families(()))
    for make in (engine_event_families, poll_families, load_families, row_families):
        yield from _of(make, 2)
    yield from (thread_family("", ()), *_of(AttachedWorker.families), *_of(EngineLoads.families))
    yield from (*Membership(NOTHING, NOTHING, NOTHING).families(), *span_families(None))


def _listed(families: Iterable[Metric]) -> dict[str, MadeFamily]:
    """Return the families by name."""
    found = {}
    for each in families:
        name = f"{each.name}_total" if each.type == "counter" else each.name
        found[name] = MadeFamily(name, each.type, getattr(each, "labels", ()), each.documentation)
    return found


COMMANDS = {
    "router": _listed(_router()),
    "router pools": _listed(_pools()),
    "indexer serve": _listed(_indexer()),
    "worker-agent serve": _listed(_serve()),
    "worker-agent attach": _listed(_attach()),
}
"""By command, the families that its process may show, by name; some only where a setting asks for what they count."""


def shown_families(exposition: str) -> set[str]:
    """Return the names of the families in what a process answers at `/metrics`."""
    lines = [line.split() for line in exposition.splitlines() if line.startswith(f"# TYPE {PREFIX}")]
    return {name if kind != "counter" or name.endswith("_total") else f"{name}_total" for _, _, name, kind in lines}
