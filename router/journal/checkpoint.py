"""Checkpoints of a router's state: taken at one moment, written in parts, and restored.

The tables of the core are its own (`router/native/core.cpp`), those of the fleet, the breakers and the policy are here.
All are as they are at one moment, whatever changes later: what is small is copied then, blocks that were routed become
rows before they change, or when they are read. `restore` puts one part into an empty state, tables in their order: a
lease is restored behind its rank.

No table has what follows from the others: views and what they are made of, columns, trees of chains.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import GenericAlias
from typing import Any, NamedTuple

import msgspec

from kv_protocol.errors import UNDECODABLE
from kv_protocol.journal import CheckpointBegan, CheckpointEnded, CheckpointPart
from router.decision.policies import Mode
from router.decision.policy import Policy
from router.decision.state import RouterState
from router.decision.state_settings import StateSettings
from router.fleet.breakers import BreakerRow, BreakerStatistics
from router.fleet.registry import FleetTotals, Worker

TABLES = (
    "policy", "turns", "fleet", "workers", "ledger", "ranks", "leases", "approximate", "stretches", "affinity", "bound",
    "idle", "session_leases", "breaker_totals", "breakers", "history_moment", "history", "epochs", "predictions",
    "seen", "newcomers", "forecasts", "ttft", "itl", "pending", "rates", "model_rates", "rank_rates", "expected",
)  # fmt: skip
"""In the order in which they are restored."""
PART_BYTES = 32 * 1024
"""A part ends with the row that reaches this size."""
_PART_ROWS_MAX = 256
_LONG_ARRAY = b"\xdd"
"""First byte of a msgpack list whose length follows as a u32."""
_encode = msgspec.msgpack.Encoder().encode


class CheckpointUnusable(Exception):
    """The checkpoint cannot be restored: it is incomplete, or of another version."""


class StateTable(NamedTuple):
    """One table that is not the core's: the type of its rows, how to read them, and how to restore one."""

    row: type[Any]
    rows: Callable[[], Iterable[Any]]
    restore: Callable[[Any], None]


def tables_of(state: RouterState) -> dict[str, StateTable]:
    """Return the tables of the state that are not the core's."""
    fleet, breakers = state.fleet, state.breakers
    return {
        "policy": StateTable(Policy, lambda: [state.policy], partial(setattr, state, "policy")),
        "fleet": StateTable(FleetTotals, lambda: [fleet.totals_row()], fleet.restore_totals),
        "workers": StateTable(Worker, lambda: list(fleet.workers()), partial(_restore_worker, state)),
        "breaker_totals": StateTable(BreakerStatistics, lambda: [breakers.statistics()], breakers.restore_totals),
        "breakers": StateTable(BreakerRow, breakers.rows, breakers.restore),
    }


def _restore_worker(state: RouterState, worker: Worker) -> None:
    state.fleet.restore(worker)
    state.show_worker(worker.registration.worker_id)


class JournalCheckpoint:
    """A state at the time of creation, after the passing of time until `began.now_s` was applied."""

    def __init__(self, state: RouterState, began: CheckpointBegan) -> None:
        state.apply(began)
        self.began = began
        self.worker_ids = frozenset(worker.registration.worker_id for worker in state.fleet.workers())
        self._tables = {name: list(_chunks(table.rows())) for name, table in tables_of(state).items()}
        self._core = state.core.checkpoint()

    def parts(self) -> Iterator[CheckpointPart | CheckpointEnded]:
        """Yield the parts, at least one per table, and the end. Only once: rows are made as they are read."""
        count = 0
        for name in TABLES:
            for data in self._tables.get(name) or iter(partial(self._core.next, name), None):
                count += 1
                yield CheckpointPart(now_s=self.began.now_s, table=name, rows=data)
        yield CheckpointEnded(now_s=self.began.now_s, parts=count)


def _chunks(rows: Iterable[object]) -> Iterator[bytes]:
    """Yield msgpack lists of the rows; the last may be empty."""
    chunk, size = list[bytes](), 0
    for row in rows:
        encoded = _encode(row)
        chunk.append(encoded)
        size += len(encoded)
        if size >= PART_BYTES or len(chunk) == _PART_ROWS_MAX:
            yield _list_of(chunk)
            chunk, size = [], 0
    yield _list_of(chunk)


def _list_of(encoded: list[bytes]) -> bytes:
    return b"".join((_LONG_ARRAY, len(encoded).to_bytes(4), *encoded))


class Restoring:
    """A state that is being restored from a checkpoint's parts."""

    def __init__(self, began: CheckpointBegan, modes: Mapping[str, Mode]) -> None:
        self._state = RouterState(msgspec.convert(began.settings, StateSettings), modes)
        self._tables = tables_of(self._state)
        self._missing = set(TABLES)
        self._parts = 0

    def add(self, part: CheckpointPart) -> None:
        """Add the rows of the part to the state.

        Raises:
            CheckpointUnusable: they are of another version.
        """
        if part.table not in TABLES:
            raise CheckpointUnusable(f"table {part.table} is not known here")
        table = self._tables.get(part.table)
        try:
            if table is None:
                self._state.core.restore(part.table, part.rows)
            else:
                for row in msgspec.msgpack.decode(part.rows, type=GenericAlias(list, (table.row,))):
                    table.restore(row)
        except (*UNDECODABLE, KeyError, IndexError) as error:
            raise CheckpointUnusable(f"table {part.table}: {error!r}") from error
        self._missing.discard(part.table)
        self._parts += 1

    def completed(self, ended: CheckpointEnded) -> RouterState:
        """Return the state.

        Raises:
            CheckpointUnusable: parts or tables are missing.
        """
        if self._parts != ended.parts:
            raise CheckpointUnusable(f"{self._parts} of {ended.parts} parts")
        if self._missing:
            raise CheckpointUnusable(f"without the tables {', '.join(sorted(self._missing))}")
        return self._state
