"""A recorder that repeats with the reference what a router's state does, and compares.

a decision that is carried out    the reference decides again and says the same in its journal record
a refusal                         the reference has no eligible rank either, for the same reasons
any other record                  is applied; those that the passing of time caused are those of the reference
every `TABLES_EVERY`th record     checkpoint tables are the same bytes
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, get_args

import msgspec

from kv_protocol.decided import RouteRequest
from kv_protocol.decision import Exclusion
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import CheckpointBegan, JournalRecord, LedgerApplied, TimePassed, decode_record
from kv_protocol.ledger import Expired, Unreported
from router.decision.eligibility import NoEligibleWorker
from router.decision.state import StateSettings
from tests.reference.state import ReferenceState

TABLES_EVERY = 20
KV_SEQ = 1
"""How far the index had read its events, as records say."""


class Decided(NamedTuple):
    """A product's decision: its journal record, with `KV_SEQ`, or why no rank was eligible."""

    request: RouteRequest
    now_s: float
    seed: int = 0
    record: bytes = b""
    exclusions: tuple[Exclusion, ...] = ()


class Answered(NamedTuple):
    """A question to the index, and its answer."""

    chain: bytes
    ranks: tuple[WorkerRank, ...]
    answer: Any


class Following:
    """The recorder. `AssertionError`: the reference differs."""

    def __init__(
        self,
        settings: StateSettings,
        decided_by: Callable[[object], Decided | None],
        tables_of: Callable[[CheckpointBegan], dict[str, list[bytes]]],
        answered: Callable[[], Answered],
    ) -> None:
        """Begin with an empty state.

        `decided_by` returns the product's decision, if a recorder was told of one; `tables_of` the parts of a
        checkpoint of the product's state, by table; `answered` what the index was asked last.
        """
        self.reference = ReferenceState(settings)
        self._decided_by, self._tables_of, self._answered = decided_by, tables_of, answered
        self._due: list[JournalRecord] = []
        self._now_s, self._records = 0.0, 0
        self.decisions = self.refusals = self.brought = 0

    def record(self, what: object) -> None:
        """`what` was applied to the product's state."""
        decided = self._decided_by(what)
        if decided is not None:
            self._now_s = decided.now_s
            self._decide(decided)
        elif isinstance(what, get_args(JournalRecord)):
            self._now_s = what.now_s
            self._apply(what)
        self._records += 1
        if self._records % TABLES_EVERY == 0:
            self.compare_tables()

    def _decide(self, decided: Decided) -> None:
        assert not self._due, self._due
        verdict, exclusions = None, tuple[Exclusion, ...]()
        try:
            verdict = self.reference.decide(decided.request, partial(self._ask, decided), decided.now_s, decided.seed)
        except NoEligibleWorker as error:
            exclusions = error.exclusions
        assert exclusions == decided.exclusions
        if verdict is None:
            self.refusals += 1
            return
        record = verdict.record(KV_SEQ)
        assert decode_record(record) == decode_record(decided.record)
        assert record == decided.record
        self.decisions += 1
        if verdict.view.is_blank:
            self.reference.apply(decode_record(record))  # which has all of it
        else:
            self.reference.take(verdict)

    def _ask(self, decided: Decided, chain: bytes, ranks: tuple[WorkerRank, ...]) -> Any:
        answered = self._answered()
        assert (chain, ranks) == (answered.chain if decided.record else b"", answered.ranks)  # a refusal has no hashes
        return answered.answer

    def _apply(self, record: JournalRecord) -> None:
        is_brought = isinstance(record, LedgerApplied) and isinstance(record.event, Expired | Unreported)
        assert [record] * is_brought == self._due[:1]
        self._due = self._due[1:]
        self.brought += is_brought
        self.reference.apply(record)
        if isinstance(record, TimePassed):
            self._due = self.reference.tick(record.now_s)

    def compare_tables(self, now_s: float = 0.0) -> None:
        """Compare the checkpoint tables that the reference has, at the later of this time and that of the last record.

        A decision that is not carried out has no record, and lets blocks count no more that should have come by then.
        """
        began = CheckpointBegan(now_s=max(now_s, self._now_s), router="router-1", settings={})
        product = self._tables_of(began)
        self.reference.apply(began)
        tables = self.reference.tables()
        assert product.keys() == {"fleet", *tables}
        for name, parts in tables.items():
            found, expected = ([msgspec.msgpack.decode(part) for part in each] for each in (product[name], parts))
            assert found == expected, name
            assert product[name] == parts, name
