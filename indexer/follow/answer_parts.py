"""Joins the parts of an answer: in any order, with repeats, never of two answers.

The first part decides which answer is joined (epoch, last seq, buckets, number of parts); parts of another one are
ignored.
"""

from typing import NamedTuple

from kv_protocol.digest import is_in_buckets
from kv_protocol.recovery import BlockColumns, DumpChunk


class AnsweredState(NamedTuple):
    """A complete answer: the blocks of a rank after `last_seq` of `epoch`, in `buckets` (empty: in all)."""

    epoch: int
    last_seq: int
    buckets: bytes
    chunks: tuple[BlockColumns, ...]

    @property
    def keeps_to_its_buckets(self) -> bool:
        """Whether all of its blocks lie in its buckets."""
        top_bytes = {top_byte for chunk in self.chunks for top_byte in chunk.hashes[7::8]}
        return all(is_in_buckets(top_byte << 56, self.buckets) for top_byte in top_bytes)


class AnswerParts:
    """The parts received so far."""

    def __init__(self) -> None:
        self._parts: dict[int, DumpChunk] = {}

    def clear(self) -> None:
        """Forget all parts."""
        self._parts.clear()

    def add(self, part: DumpChunk) -> bool:
        """Add a part; return whether it belongs to this answer and is new."""
        first = next(iter(self._parts.values()), part)
        if _answer_of(part) != _answer_of(first) or part.chunk in self._parts:
            return False
        self._parts[part.chunk] = part
        return True

    def complete_answer(self) -> AnsweredState | None:
        """Return the answer; None while parts are missing."""
        first = next(iter(self._parts.values()), None)
        if first is None or len(self._parts) < first.of:
            return None
        chunks = tuple(self._parts[at].columns for at in range(first.of) if self._parts[at].tiers)
        return AnsweredState(first.epoch, first.last_seq, first.buckets, chunks)


def _answer_of(part: DumpChunk) -> tuple[int, int, int, bytes]:
    return part.epoch, part.last_seq, part.of, part.buckets
