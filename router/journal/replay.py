"""Folds a journal and takes every decision in it again.

    JournalBegan   start with an empty state of its settings: what follows is exact
    checkpoint     if the fold was not exact: restore its state; what follows is exact. If the fold was exact: compare
                   the checkpoint with one of the folded state, byte for byte
    Decided        decide again from the fold, the recorded answer of the index and the recorded seed; compare the
                   bytes of both records; apply it with its promise
    Refused        decide again: it must find no eligible rank, and for each the recorded reason
    Lost           records are missing, and any decision may depend on them: no result is possible until the next
                   beginning or checkpoint. A journal that has lost its oldest records begins with `Lost`, too
    RankStanding   has the epoch and doubt that the index's answers state for a rank from here on
    any other      applied
    an error       the record cannot be folded: `NotFolded` has its kind and the reason. What follows is as after `Lost`

With other policies, their choices for the same requests are compared with the recorded ones, too
(`router/shadows/comparison.py`); the fold follows the recorded decisions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from kv_protocol.decided import (
    TERMS,
    TIERS,
    Decided,
    best_columns,
    best_terms,
    other_costs,
    overlap_depths,
    overlap_tiers,
)
from kv_protocol.errors import LimitExceeded, MalformedMessage, shortened
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import (
    CheckpointBegan,
    CheckpointEnded,
    CheckpointPart,
    JournalBegan,
    JournalMessage,
    JournalRecord,
    Lost,
    RankStanding,
    RecordPart,
    Refused,
    decode_record,
    encode_record,
)
from router.decision.eligibility import NoEligibleWorker, WorkerNotNamed
from router.decision.policies import MODES, Mode
from router.decision.policy import Policy
from router.decision.state import RouterState, StateSettings
from router.decision.verdict import Verdict
from router.decision.view import OverlapAnswer
from router.journal.encoder import UNHEARD, CheckpointUnusable, JournalCheckpoint, Restoring
from router.shadows.comparison import Comparison, compared

_REASON_CHARACTERS_MAX = 200
_UNKNOWN = "records are missing before it: to decide again proves nothing"


class JournalEntry(NamedTuple):
    """One message: its router, its place in the log, and the log's time (ns since 1970)."""

    router: str
    stream_seq: int
    time_ns: int
    message: JournalMessage


class Redecided(NamedTuple):
    """One recorded decision, or refusal (`recorded` is None), taken again.

    `difference` says what differs from the record or, if not `is_exact`, why the two cannot be compared: not all that
    the decision read is known. Empty: every bit is equal.
    """

    decision_id: str
    difference: str
    recorded: WorkerRank | None
    otherwise: tuple[Comparison | str, ...] = ()
    """What each other policy chooses, or one of `SKIPS`; empty for a refusal, and if not `is_exact`."""
    is_exact: bool = True
    verdict: Verdict | None = None
    """The repeated decision with all its candidates; None: it could not be repeated, or was a refusal."""

    @property
    def equal(self) -> bool:
        """Whether every bit is what was recorded."""
        return not self.difference


class CheckpointRead(NamedTuple):
    """One checkpoint: compared with the fold, or else the start of a new fold if `difference` is empty.

    `difference` says how it differs from the fold, or why it cannot be restored.
    """

    is_compared: bool
    difference: str = ""


class NotFolded(NamedTuple):
    """A record of this kind raised an error when it was folded: the fold has no state after it."""

    kind: str
    reason: str


Found = Redecided | CheckpointRead | NotFolded | None
"""Result of a record: a repeated decision or refusal, a complete checkpoint, an error, or only a changed state."""


class Contradiction(Exception):
    """The decision cannot be repeated: its ranks differ from the fold's, or its mode is unknown."""


_REFUSALS = (NoEligibleWorker, WorkerNotNamed, LimitExceeded, Contradiction)


class Replay:
    """The fold of a journal."""

    def __init__(self, *, policies: Sequence[Policy] = (), modes: Mapping[str, Mode] = MODES) -> None:
        self._others, self._modes = policies, modes
        self._continuity = Continuity()
        self._standings: dict[WorkerRank, tuple[int, str]] = {}
        self._checkpoint: Restoring | Iterator[CheckpointPart | CheckpointEnded] | None = None
        """The state that is being restored; or the parts of the folded state, to be compared with the recorded ones."""
        self.state: RouterState | None = None
        """None: earlier records are missing."""

    def read(self, message: JournalMessage) -> Iterator[tuple[JournalRecord, Found]]:
        """Fold in the new records of the next message (`Continuity.records`), and yield each with its result."""
        for record in self._continuity.records(message):
            yield record, self.take(record)

    def take(self, record: JournalRecord) -> Found:
        """Fold the next record in. After one that cannot be folded the state is None until the next start."""
        try:
            return self._folded(record)
        except Exception as error:  # noqa: BLE001 - a record of another version, or a forged one, may raise anything
            self.state = self._checkpoint = None
            reason = shortened(f"{type(error).__name__}: {error}", _REASON_CHARACTERS_MAX)
            return NotFolded(str(record.__struct_config__.tag), reason)

    def _folded(self, record: JournalRecord) -> Found:
        match record:
            case Decided():
                return self._decided(record)
            case Refused():
                return self._refused(record)
            case CheckpointPart() | CheckpointEnded():
                return self._go_on_with_checkpoint(record)
            case JournalBegan():
                self.state = RouterState(msgspec.convert(record.settings, StateSettings), self._modes)
                self._standings.clear()
            case CheckpointBegan():
                self._standings.clear()
                state = self.state
                self._checkpoint = (
                    Restoring(record, self._modes) if state is None else JournalCheckpoint(state, record).parts()
                )
            case RankStanding():
                self._standings[WorkerRank(record.worker_id, record.dp_rank)] = record.epoch, record.doubt
            case Lost():
                self.state = self._checkpoint = None
            case _ if self.state is not None:
                self.state.apply(record)
        return None

    def _go_on_with_checkpoint(self, record: CheckpointPart | CheckpointEnded) -> CheckpointRead | None:
        checkpoint = self._checkpoint
        if checkpoint is None:
            return None  # its beginning is missing
        if not isinstance(checkpoint, Restoring):
            table = record.table if isinstance(record, CheckpointPart) else "end"
            words = f"checkpoint: table {table} is not as the records before it make it"
            difference = "" if next(checkpoint, None) == record else words
            is_over = bool(difference) or isinstance(record, CheckpointEnded)
            self._checkpoint = None if is_over else checkpoint
            return CheckpointRead(is_compared=True, difference=difference) if is_over else None
        try:
            if isinstance(record, CheckpointPart):
                checkpoint.add(record)
                return None
            self.state, self._checkpoint = checkpoint.completed(record), None
        except CheckpointUnusable as error:
            self._checkpoint = None
            return CheckpointRead(is_compared=False, difference=f"checkpoint: {error}")
        return CheckpointRead(is_compared=False)

    def _lose(self, _: Lost) -> None:
        self.state = self._checkpoint = None

    # ------------------------------------------------------------------------------------------------- decisions

    def _decided(self, record: Decided) -> Redecided:
        request, state = record.request, self.state
        if state is None:
            return Redecided(request.decision_id, _UNKNOWN, record.rank, is_exact=False)
        if record.policy not in self._modes or state.policy.mode not in self._modes:
            state.apply(record)
            return Redecided(request.decision_id, _unknown_mode(record.policy), record.rank, is_exact=False)
        try:
            verdict = state.decide(request, partial(self._answer, record), record.now_s, record.seed)
        except _REFUSALS as error:
            state.apply(record)
            words = f"{record.rank} was chosen; now {error}"
            return Redecided(request.decision_id, words, record.rank, ("no_choice",) * len(self._others))
        otherwise = tuple([compared(state, verdict, state.policy, other, is_folded=True) for other in self._others])
        difference = ""
        if (found := verdict.journal_record(record.kv_seq)) != encode_record(record):
            difference = difference_of(record, found, verdict.ranks)
        if not difference or verdict.promise == record.promise:
            state.take(verdict)
        else:
            state.apply(record)
        return Redecided(request.decision_id, difference, record.rank, otherwise, verdict=verdict)

    def _answer(self, record: Decided, _: bytes, ranks: tuple[WorkerRank, ...]) -> OverlapAnswer:
        if len(ranks) != record.ranks:
            raise Contradiction(f"{len(ranks)} ranks serve {record.request.model}, recorded are {record.ranks}")
        standings = [self._standings.get(rank, UNHEARD) for rank in ranks]
        epochs, doubts = tuple(epoch for epoch, _ in standings), tuple(doubt for _, doubt in standings)
        return np.array(overlap_tiers(record), np.int32), epochs, (0,) * len(ranks), doubts

    def _refused(self, record: Refused) -> Redecided:
        request, state = record.request, self.state
        if state is None:
            return Redecided(request.decision_id, _UNKNOWN, None, is_exact=False)
        if state.policy.mode not in self._modes:
            return Redecided(request.decision_id, _unknown_mode(state.policy.mode), None, is_exact=False)
        try:
            verdict = state.decide(request, _no_overlap, record.now_s, 0)
        except NoEligibleWorker as error:
            difference = "" if error.exclusions == record.exclusions else f"exclusions: {error}"
        except WorkerNotNamed as error:
            difference = str(error)
        else:
            difference = f"no rank was eligible; now {verdict.winner} is"
        return Redecided(request.decision_id, difference, None)


def _unknown_mode(mode: str) -> str:
    return f"mode {mode} is not known here: policy.user_modes names those of the journal's router"


def _no_overlap(_: bytes, ranks: tuple[WorkerRank, ...]) -> OverlapAnswer:
    """Return an empty answer of the index: eligibility does not depend on it."""
    zeros = (0,) * len(ranks)
    return np.zeros((TIERS, len(ranks)), np.int32), zeros, zeros, ("",) * len(ranks)


def difference_of(recorded: Decided, found: bytes, ranks: Sequence[WorkerRank]) -> str:
    """Return in words how the repeated decision's record differs; empty if it does not. Column i is of `ranks[i]`."""
    again = decode_record(found)
    assert isinstance(again, Decided)
    words = []
    for field in Decided.__struct_fields__:
        if encode_record(getattr(recorded, field)) != encode_record(getattr(again, field)):
            before, now = _values(field, recorded, ranks), _values(field, again, ranks)
            name = next((name for name in before if name in now and now[name] != before[name]), None)
            words.append(f"{name} now {now[name]!r}, recorded {before[name]!r}" if name else f"{field}: of others")
    return "; ".join(words)


def _values(field: str, decided: Decided, ranks: Sequence[WorkerRank]) -> dict[str, object]:
    """Return the values of a field of the record, by the names under which a difference shows them."""
    match field:
        case "terms":
            rows = zip(best_columns(decided.best), best_terms(decided), strict=True)
            return {f"{ranks[column]}: {term}": getattr(terms, term) for column, terms in rows for term in TERMS}
        case "best":
            return {"best:": best_columns(decided.best)}
        case "costs":
            return {f"cost of another {at}:": each for at, each in enumerate(other_costs(decided))}
        case "overlap":
            return {f"overlap {rank}:": each for rank, each in zip(ranks, overlap_depths(decided), strict=True)}
        case _:
            return {f"{field}:": getattr(decided, field)}


class Continuity:
    """Position in one router's messages: which records are new, and whether any are missing."""

    def __init__(self) -> None:
        self._life = 0
        self._expected = 0
        self._parts = list[bytes]()
        """Parts of a longer record that is incomplete."""

    def records(self, message: JournalMessage) -> Iterator[JournalRecord]:
        """Yield the new records of the next message, after a `Lost` if some are missing."""
        if message.life != self._life:
            self._life, self._expected = message.life, 1
            self._parts.clear()
        if message.first > self._expected:
            self._parts.clear()
            yield Lost(now_s=math.nan, count=message.first - self._expected)
        number = message.first
        for record in message.records:
            if number >= self._expected:
                if type(record) is RecordPart:
                    yield from self._joined(record)
                else:
                    self._parts.clear()
                    yield record
            number += record.count if type(record) is Lost else 1
        self._expected = max(self._expected, number)

    def _joined(self, record: RecordPart) -> Iterator[JournalRecord]:
        """Yield the longer record after its last part; `Lost` for a part that does not follow the one before."""
        if record.index != len(self._parts):
            self._parts.clear()
            yield Lost(now_s=record.now_s, count=1)
            return
        self._parts.append(record.data)
        if len(self._parts) == record.count:
            data = b"".join(self._parts)
            self._parts.clear()
            try:
                yield decode_record(data)
            except MalformedMessage:
                yield Lost(now_s=record.now_s, count=1)
