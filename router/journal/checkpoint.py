"""Checkpoints of a router's state: taken at one moment, written in parts, and restored.

Each component of the state has its tables here; a table's rows are as they are when `rows` is called, whatever changes
later. What grows with the fleet and the requests in flight is copied then. What can be much larger (blocks that were
routed, idle sessions, decisions without an outcome) is made into rows when they are read: its entries are immutable,
or are copied before they change. `restore` puts one row into an empty state, tables in their order: a lease is
restored behind its rank.

No table has what follows from the others: views and what they are made of, columns, trees of chains.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import GenericAlias
from typing import Any, NamedTuple

import msgspec

from kv_protocol.checkpoint import CheckpointBegan, CheckpointEnded, CheckpointPart
from kv_protocol.errors import UNDECODABLE
from router.decision.policies import Mode
from router.decision.policy import Policy
from router.decision.state import RouterState
from router.decision.state_settings import StateSettings
from router.fleet.breakers import BreakerStatistics
from router.fleet.registry import Worker
from router.journal.checkpoint_rows import (
    AffinityTotals,
    ApproximateTotals,
    BoundRow,
    BreakerRow,
    ExpectedRow,
    FitRow,
    FleetTotals,
    ForecastTotals,
    HistoryMoment,
    HistoryRow,
    IdleRow,
    LeaseRow,
    LedgerRow,
    LedgerTotals,
    LifeRow,
    ModelRatesRow,
    NewcomerRow,
    PendingRow,
    PredictionRow,
    RankRatesRow,
    RatesTotals,
    SeenRow,
    SessionLeaseRow,
    StretchRow,
)

PART_BYTES = 32 * 1024
"""A part ends with the row that reaches this size."""
_PART_ROWS_MAX = 256
_LONG_ARRAY = b"\xdd"
"""First byte of a msgpack list whose length follows as a u32."""
_encode = msgspec.msgpack.Encoder().encode


class CheckpointUnusable(Exception):
    """The checkpoint cannot be restored: it is incomplete, or of another version."""


class DecisionsRow(NamedTuple):
    """Row of a checkpoint: number of decisions for a model."""

    model: str
    decisions: int


class StateTable(NamedTuple):
    """One table of a state: the type of its rows, how to read them, and how to restore one."""

    name: str
    row: type[Any]
    rows: Callable[[], Iterable[Any]]
    restore: Callable[[Any], None]


def tables_of(state: RouterState) -> tuple[StateTable, ...]:
    """Return all tables of the state, in the order in which they are restored."""
    fleet, ledger, approximate, affinity = state.fleet, state.ledger, state.approximate, state.affinity
    breakers, history, predictions, newcomers = state.breakers, state.history, state.predictions, state.newcomers
    forecasts, rates = state.forecasts, state.rates
    return (
        StateTable("policy", Policy, lambda: [state.policy], partial(_restore_policy, state)),
        StateTable(
            "turns",
            DecisionsRow,
            lambda: list(map(DecisionsRow._make, state.decisions_by_model.items())),
            partial(_restore_decisions, state),
        ),
        StateTable("fleet", FleetTotals, lambda: [fleet.totals_row()], fleet.restore_totals),
        StateTable("workers", Worker, lambda: list(fleet.workers()), fleet.restore),
        StateTable("ledger", LedgerTotals, lambda: [ledger.totals_row()], ledger.restore_totals),
        StateTable("ranks", LedgerRow, ledger.rank_rows, ledger.restore_rank),
        StateTable("leases", LeaseRow, ledger.lease_rows, ledger.restore_lease),
        StateTable("approximate", ApproximateTotals, lambda: [approximate.totals_row()], approximate.restore_totals),
        StateTable("stretches", StretchRow, approximate.rows, approximate.restore),
        StateTable("affinity", AffinityTotals, lambda: [affinity.totals_row()], affinity.restore_totals),
        StateTable("bound", BoundRow, affinity.bound_rows, affinity.restore_bound),
        StateTable("idle", IdleRow, affinity.idle_rows, affinity.restore_idle),
        StateTable("session_leases", SessionLeaseRow, affinity.lease_rows, affinity.restore_lease),
        StateTable("breaker_totals", BreakerStatistics, lambda: [breakers.statistics()], breakers.restore_totals),
        StateTable("breakers", BreakerRow, breakers.rows, breakers.restore),
        StateTable("history_moment", HistoryMoment, lambda: [history.moment_row()], history.restore_moment),
        StateTable("history", HistoryRow, history.rows, history.restore),
        StateTable("epochs", LifeRow, predictions.life_rows, predictions.restore_life),
        StateTable("predictions", PredictionRow, predictions.rows, predictions.restore),
        StateTable("seen", SeenRow, predictions.seen_rows, predictions.restore_seen),
        StateTable("newcomers", NewcomerRow, newcomers.rows, newcomers.restore),
        StateTable("forecasts", ForecastTotals, lambda: [forecasts.totals_row()], forecasts.restore_totals),
        StateTable("ttft", FitRow, forecasts.ttft.rows, forecasts.ttft.restore),
        StateTable("itl", FitRow, forecasts.itl.rows, forecasts.itl.restore),
        StateTable("pending", PendingRow, forecasts.rows, forecasts.restore),
        StateTable("rates", RatesTotals, lambda: [rates.totals_row()], rates.restore_totals),
        StateTable("model_rates", ModelRatesRow, rates.model_rows, rates.restore_model),
        StateTable("rank_rates", RankRatesRow, rates.rank_rows, rates.restore_rank),
        StateTable("expected", ExpectedRow, rates.expected_rows, rates.restore_expected),
    )


def _restore_policy(state: RouterState, policy: Policy) -> None:
    state.policy = policy


def _restore_decisions(state: RouterState, row: DecisionsRow) -> None:
    state.decisions_by_model[row.model] = row.decisions


class JournalCheckpoint:
    """A state at the time of creation, after the passing of time until `began.now_s` was applied."""

    def __init__(self, state: RouterState, began: CheckpointBegan) -> None:
        state.apply(began)
        self.began = began
        self.worker_ids = frozenset(worker.registration.worker_id for worker in state.fleet.workers())
        self._tables = [(table.name, table.rows()) for table in tables_of(state)]

    def parts(self) -> Iterator[CheckpointPart | CheckpointEnded]:
        """Yield the parts, at least one per table, and the end. Only once: rows are made as they are read."""
        count = 0
        for name, rows in self._tables:
            for data in _chunks(rows):
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


class CheckpointComparison:
    """A checkpoint of a folded state, compared part by part with the one written at the same place."""

    def __init__(self, state: RouterState, began: CheckpointBegan) -> None:
        self._parts = JournalCheckpoint(state, began).parts()

    def difference(self, part: CheckpointPart | CheckpointEnded) -> str:
        """Return in words how the next written part differs; empty if it does not."""
        folded = next(self._parts, None)
        if part == folded:
            return ""
        table = part.table if isinstance(part, CheckpointPart) else "end"
        return f"checkpoint: table {table} is not as the records before it make it"


class Restoring:
    """A state that is being restored from a checkpoint's parts."""

    def __init__(self, began: CheckpointBegan, modes: Mapping[str, Mode]) -> None:
        self._state = msgspec.convert(began.settings, StateSettings).state(modes)
        self._tables = {table.name: table for table in tables_of(self._state)}
        self._missing = set(self._tables)
        self._parts = 0

    def add(self, part: CheckpointPart) -> None:
        """Add the rows of the part to the state.

        Raises:
            CheckpointUnusable: they are of another version.
        """
        table = self._tables.get(part.table)
        if table is None:
            raise CheckpointUnusable(f"table {part.table} is not known here")
        try:
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
