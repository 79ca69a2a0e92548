"""The questions about one rank: which is answered next, and how: by replay, repair or dump.

A question is a reader's recovery request. Questions wait in a queue, and are answered one at a time, each of them once.

    asker            the inbox that answers go to; a new question of an asker replaces its earlier one
    first question   waits; with `QUESTIONS_MAX` askers waiting it is turned away, and the asker tries again
    further one      while the asker's earlier question waits or is being answered: with a higher number it replaces the
                     earlier one, and an answer in progress stops; else it is a repetition, or was sent earlier and
                     arrived late, and is dropped. An asker must number its questions upwards

An answer has the state at the moment when it begins, however long sending takes: the data is copied then, and split
into chunks while it is sent. Which kind answers which question: `kv_protocol/recovery.py`.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Literal, NamedTuple

from kv_protocol.digest import differing_buckets
from kv_protocol.recovery import Answer, BlockColumns, DumpChunk, RecoverRequest, ReplayChunk, block_columns
from worker_agent.events.mirror import HeldBlocks, RankMirror
from worker_agent.events.outbox import Outbox

QUESTIONS_MAX = 256

QuestionOutcome = Literal["taken", "replaced", "dropped", "turned_away"]


class PendingRecovery(NamedTuple):
    """A question: a recovery request, and the inbox for its answer."""

    asker: str
    request: RecoverRequest


class Questions:
    """The questions about one rank: those that wait, and the one that is being answered."""

    def __init__(self) -> None:
        self._waiting: dict[str, PendingRecovery] = {}
        self._current: PendingRecovery | None = None

    def ask(self, question: PendingRecovery) -> QuestionOutcome:
        """Queue a question; return the outcome. `replaced`: it replaced an earlier question of the asker."""
        asker = question.asker
        is_current = self._current is not None and self._current.asker == asker
        present = self._waiting.get(asker) or (self._current if is_current else None)
        if present is not None and question.request.request_id <= present.request.request_id:
            return "dropped"
        if present is None and len(self._waiting) >= QUESTIONS_MAX:
            return "turned_away"
        self._waiting[asker] = question
        if is_current:
            self._current = None
        return "taken" if present is None else "replaced"

    def next(self) -> PendingRecovery | None:
        """Return the question to answer now; None if none waits."""
        asker = next(iter(self._waiting), None)
        self._current = None if asker is None else self._waiting.pop(asker)
        return self._current

    def is_current(self, question: PendingRecovery) -> bool:
        """Return whether the question being answered is still this one."""
        return self._current is question


CHUNK_BLOCKS = 8192
"""Blocks in a chunk: some 10 ms of work, and 136 KiB."""
_BLOCK_BYTES = 17
_ENVELOPE_BYTES = 256
_NO_BLOCKS = BlockColumns(b"", b"", b"")

Kind = Literal["replay", "repair", "dump"]
KINDS: tuple[Kind, ...] = ("replay", "repair", "dump")


def kind_of(part: Answer) -> Kind:
    """Return the kind of the answer that this part belongs to."""
    if isinstance(part, ReplayChunk):
        return "replay"
    return "repair" if part.buckets else "dump"


def answer(request: RecoverRequest, outbox: Outbox, mirror: RankMirror, chunk_blocks: int) -> Iterator[Answer]:
    """Return the parts (at least one) of the answer to a question, generated lazily."""
    if request.epoch == outbox.epoch:
        if request.buckets:
            buckets = differing_buckets(request.buckets, mirror.bucket_table())
            return _dump(request.request_id, outbox, mirror.dump(buckets), chunk_blocks, buckets)
        tail = outbox.tail(request.after_seq, _BLOCK_BYTES * mirror.held_blocks + _ENVELOPE_BYTES)
        if tail is not None:
            return _replay(request.request_id, outbox, tail)
    return _dump(request.request_id, outbox, mirror.dump(), chunk_blocks)


def _dump(
    request_id: int, outbox: Outbox, held: HeldBlocks, chunk_blocks: int, buckets: bytes = b""
) -> Iterator[DumpChunk]:
    epoch, last_seq, of = outbox.epoch, outbox.last_seq, max(1, -(-len(held) // chunk_blocks))
    parts = chain(block_columns(held, chunk_blocks), [_NO_BLOCKS])
    return (
        DumpChunk(
            request_id=request_id,
            epoch=epoch,
            last_seq=last_seq,
            chunk=index,
            of=of,
            parents=part.parents,
            hashes=part.hashes,
            tiers=part.tiers,
            buckets=buckets,
        )
        for index, part in zip(range(of), parts, strict=False)
    )


def _replay(request_id: int, outbox: Outbox, tail: list[bytes]) -> Iterator[ReplayChunk]:
    epoch, last_seq = outbox.epoch, outbox.last_seq
    return (
        ReplayChunk(request_id=request_id, epoch=epoch, last_seq=last_seq, message=message) for message in tail or [b""]
    )
