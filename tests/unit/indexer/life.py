"""A rank as an index hears of it: batches, pulses and answers of one consolidator, all of them right."""

from collections.abc import Iterable, Sequence, Sized
from random import Random

from indexer.follow.fold import IndexFold
from indexer.follow.inputs import Fact, Question, Received, read_message
from kv_protocol import codec
from kv_protocol.digest import SetDigest, bucket_table, differing_buckets, is_in_buckets
from kv_protocol.events import TIERS, Batch, Cleared, Event, Removed, Stored, Tier
from kv_protocol.fleet import Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import Answer, HeldBlock, RecoverRequest, ReplayChunk
from kv_protocol.splitmix import splitmix64
from tests.dumped import dump_chunks
from tests.reference.index.nodes import parents_first

RING_BATCHES = 12
EPOCH = 11
"""Of what is told without a life."""


def told(fold: IndexFold, *facts: Fact, now_s: float = 0) -> list[Question]:
    """Return what the fold asks after these facts."""
    return [question for fact in facts for question in fold.apply(fact, now_s)]


def unreadable(rank: WorkerRank) -> Received:
    return Received(rank, None)


def arrived(rank: WorkerRank, *batches: Batch) -> Received:
    return Received(rank, read_message(codec.encode_message(batches)))


def batch(rank: WorkerRank, seq: int, event: Event, epoch: int = EPOCH) -> Received:
    return arrived(rank, Batch(epoch, seq, event))


def pulse(
    rank: WorkerRank, last_seq: int, *gpu: int, epoch: int = EPOCH, host: Sequence[int] = (), stale: str = ""
) -> Received:
    tiers = (SetDigest(gpu).of_tier(Tier.GPU), SetDigest(host).of_tier(Tier.HOST))
    return Received(rank, Heartbeat(instance="i", epoch=epoch, last_seq=last_seq, tiers=tiers, stale=stale))


def stale(fold: IndexFold, *ranks: WorkerRank) -> list[str]:
    return [view.stale for view in fold.overlap((), ranks)]


class Life:
    """A rank's consolidator; a store is of `blocks_max` blocks at most. It keeps the last few batches for replays."""

    def __init__(self, rank: WorkerRank, random: Random, *, blocks_max: int = 2) -> None:
        self.rank, self.random, self.blocks_max = rank, random, blocks_max
        self.begin(7)

    def begin(self, epoch: int) -> None:
        self.epoch, self.seq = epoch, 0
        self.held: dict[int, tuple[int | None, int]] = {}
        self.ring: list[Batch] = []

    def batch(self) -> Batch:
        return self.published(self.event())

    def published(self, event: Event) -> Batch:
        self.seq += 1
        self.ring = [*self.ring, Batch(self.epoch, self.seq, event, self.seq, 1000 + self.seq)][-RING_BATCHES:]
        return self.ring[-1]

    def event(self) -> Event:
        tier = self.random.choice(TIERS)
        held = [block for block, (_, bits) in self.held.items() if bits >> tier & 1]
        if self.random.random() < 0.03:
            self.release(held, tier)
            return Cleared(tier)
        if held and self.random.random() < 0.4:
            gone = tuple(self.random.sample(held, min(self.blocks_max, len(held))))
            self.release(gone, tier)
            return Removed(gone, tier)
        return self.store(tier)

    def store(self, tier: Tier) -> Stored:
        parent = self.random.choice([None, *self.held])
        blocks = [splitmix64((parent or 0) + self.random.randrange(2))]
        for _ in range(self.random.randrange(self.blocks_max)):
            blocks.append(splitmix64(blocks[-1]))
        for above, block in zip([parent, *blocks], blocks, strict=False):
            self.held[block] = (above, self.held.get(block, (None, 0))[1] | 1 << tier)
        return Stored(tuple(blocks), parent, 0 if parent is None else 1, tier)

    def release(self, blocks: Iterable[int], tier: Tier) -> None:
        for block in blocks:
            parent, bits = self.held.pop(block)
            if bits & ~(1 << tier):
                self.held[block] = (parent, bits & ~(1 << tier))

    def clear(self) -> list[Batch]:
        """Return the batches after which nothing is held."""
        self.held.clear()
        return [self.published(Cleared(tier)) for tier in TIERS]

    def rows(self) -> list[HeldBlock]:
        """Return what is held, parents first."""
        order = parents_first({block: parent for block, (parent, _) in self.held.items()})
        return [HeldBlock(block, *self.held[block]) for block in order]

    def digests(self) -> list[SetDigest]:
        return [SetDigest(block for block, (_, bits) in self.held.items() if bits >> tier & 1) for tier in TIERS]

    def beat(self) -> Received:
        return Received(self.rank, self.heartbeat())

    def heartbeat(self) -> Heartbeat:
        tiers = tuple(digest.of_tier(tier) for tier, digest in zip(TIERS, self.digests(), strict=True))
        return Heartbeat(instance="i", epoch=self.epoch, last_seq=self.seq, tiers=tiers)

    def answer(self, question: Question) -> list[Received]:
        return [Received(self.rank, part) for part in self.parts(question.request)]

    def parts(self, request: RecoverRequest) -> list[Answer]:
        """Return the repair, the replay or the dump that is asked for."""
        number, tail = request.request_id, [batch for batch in self.ring if batch.seq > request.after_seq]
        if request.epoch == self.epoch and request.buckets:
            buckets = differing_buckets(request.buckets, bucket_table(digest.buckets for digest in self.digests()))
            rows = [row for row in self.rows() if is_in_buckets(row.sequence_hash, buckets)]
            return [*dump_chunks(number, self.epoch, self.seq, rows, buckets=buckets, chunk_blocks=_chunk_blocks(rows))]
        if request.epoch == self.epoch and len(tail) == self.seq - request.after_seq:
            parts = [codec.encode_message(tail[at : at + 3]) for at in range(0, len(tail), 3)] or [b""]
            return [ReplayChunk(request_id=number, epoch=self.epoch, last_seq=self.seq, message=part) for part in parts]
        rows = self.rows()
        return [*dump_chunks(number, self.epoch, self.seq, rows, chunk_blocks=_chunk_blocks(rows))]


def _chunk_blocks(rows: Sized) -> int:
    """Return how many blocks a part of a dump has: few, so that there are several, and no more than a dump may have."""
    return max(4, len(rows) // 1000)
