"""A rank as an index hears of it: batches, pulses and dumps of one consolidator, all of them right."""

from collections.abc import Iterable
from random import Random

from indexer.core.facts import ChunkArrived, HeartbeatArrived, Question
from kv_protocol.digest import SetDigest
from kv_protocol.events import TIERS, Batch, Cleared, Event, Removed, Stored, Tier
from kv_protocol.fleet import Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import HeldBlock, dump_chunks, parents_first
from kv_protocol.splitmix import splitmix64


class Life:
    """A rank's consolidator; a store is of `blocks_max` blocks at most."""

    def __init__(self, rank: WorkerRank, random: Random, *, blocks_max: int = 2) -> None:
        self.rank, self.random, self.blocks_max = rank, random, blocks_max
        self.begin(7)

    def begin(self, epoch: int) -> None:
        self.epoch, self.seq = epoch, 0
        self.held: dict[int, tuple[int | None, int]] = {}

    def batch(self) -> Batch:
        self.seq += 1
        return Batch(self.epoch, self.seq, self.event(), self.seq, 1000 + self.seq)

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
        self.seq += len(TIERS)
        return [Batch(self.epoch, self.seq - len(TIERS) + 1 + at, Cleared(tier)) for at, tier in enumerate(TIERS)]

    def rows(self) -> list[HeldBlock]:
        """Return what is held, parents first."""
        order = parents_first({block: parent for block, (parent, _) in self.held.items()})
        return [HeldBlock(block, *self.held[block]) for block in order]

    def beat(self) -> HeartbeatArrived:
        tiers = tuple(
            SetDigest(block for block, (_, bits) in self.held.items() if bits >> tier & 1).of_tier(tier)
            for tier in TIERS
        )
        heartbeat = Heartbeat(instance="i", epoch=self.epoch, last_seq=self.seq, tiers=tiers)
        return HeartbeatArrived(self.rank, heartbeat)

    def answer(self, question: Question) -> list[ChunkArrived]:
        chunks = dump_chunks(question.request.request_id, self.epoch, self.seq, self.rows(), chunk_blocks=4)
        return [ChunkArrived(self.rank, chunk) for chunk in chunks]
