"""The stream's state machine always comes to rest.

One reader, consolidators that are right, and a network that is not: whatever was lost, late, doubled or said by a
former life, some seconds after the network is well again the reader has the set, knows it, and asks no more. Planted
bugs show that this can fail.
"""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

import pytest

from indexer.follow.effects import ApplyEvent, Effect, RepairBuckets, ReplaceAll
from indexer.follow.follower import FollowerLimits, StreamFollower
from kv_protocol import codec
from kv_protocol.digest import SetDigest, TierDigest, bucket_table, differing_buckets, is_in_buckets
from kv_protocol.events import TIERS, Batch, Cleared, Event, Removed, Stored, Tier
from kv_protocol.fleet import Heartbeat
from kv_protocol.recovery import Answer, DumpChunk, HeldBlock, RecoverRequest, ReplayChunk
from kv_protocol.splitmix import choice_index, splitmix64, unit_interval
from tests.dumped import dump_chunks
from tests.support.amount import examples

LIMITS = FollowerLimits(gap_s=0.0, behind_s=2.0, answer_s=2.0, silent_s=3.0, early_batches_max=16)
STEP_S, FAULTS_S, END_S = 0.25, 30.0, 55.0

RING_BATCHES = 12
BLOCKS = [splitmix64(number) for number in range(40)]

Message = Batch | Heartbeat | Answer | RecoverRequest


class Dice:
    """A seed's numbers, one after another."""

    def __init__(self, seed: int) -> None:
        self.seed, self.draw = seed, 0

    def chance(self, probability: float) -> bool:
        self.draw += 1
        return unit_interval(self.seed, self.draw) < probability

    def below(self, count: int) -> int:
        self.draw += 1
        return choice_index(self.seed, count, self.draw)

    def delay_s(self, most_s: float) -> float:
        self.draw += 1
        return unit_interval(self.seed, self.draw) * most_s


def fold(held: set[int], event: Event) -> None:
    match event:
        case Stored(blocks):
            held.update(blocks)
        case Removed(blocks):
            held.difference_update(blocks)
        case Cleared():
            held.clear()


def table(held: set[int]) -> bytes:
    return bucket_table(SetDigest(held if tier is Tier.GPU else ()).buckets for tier in TIERS)


class Life:
    """A consolidator that is right: one epoch."""

    def __init__(self, epoch: int, ends_s: float) -> None:
        self.epoch, self.ends_s, self.last_seq = epoch, ends_s, 0
        self.held: set[int] = set()
        self.ring: list[Batch] = []

    def change(self, dice: Dice) -> Batch:
        gone = sorted(self.held)[: 1 + dice.below(3)]
        event: Event = Stored((BLOCKS[dice.below(len(BLOCKS))],))
        if dice.chance(0.02):
            event = Cleared()
        elif gone and dice.chance(0.4):
            event = Removed(tuple(gone))
        fold(self.held, event)
        self.last_seq += 1
        self.ring = [*self.ring, Batch(self.epoch, self.last_seq, event)][-RING_BATCHES:]
        return self.ring[-1]

    def beat(self) -> Heartbeat:
        digest = SetDigest(self.held).of_tier(Tier.GPU)
        return Heartbeat(instance="i", epoch=self.epoch, last_seq=self.last_seq, tiers=(digest,))

    def answer(self, request: RecoverRequest) -> list[Answer]:
        tail = [batch for batch in self.ring if batch.seq > request.after_seq]
        if request.epoch == self.epoch and request.buckets:
            return [*self.dump(request.request_id, differing_buckets(request.buckets, table(self.held)))]
        if request.epoch == self.epoch and len(tail) == self.last_seq - request.after_seq:
            parts = [codec.encode_message(tail[at : at + 3]) for at in range(0, len(tail), 3)] or [b""]
            return [
                ReplayChunk(request_id=request.request_id, epoch=self.epoch, last_seq=self.last_seq, message=part)
                for part in parts
            ]
        return [*self.dump(request.request_id)]

    def dump(self, request_id: int, buckets: bytes = b"") -> list[DumpChunk]:
        held = [block for block in sorted(self.held) if not buckets or is_in_buckets(block, buckets)]
        rows = [HeldBlock(block, None, 1) for block in held]
        return dump_chunks(request_id, self.epoch, self.last_seq, rows, buckets=buckets, chunk_blocks=7)


class World:
    """Lives, one after another or side by side; a log; a network with faults until `FAULTS_S`; one reader."""

    def __init__(self, seed: int, follower: StreamFollower) -> None:
        self.dice, self.follower, self.now_s = Dice(seed), follower, 0.0
        self.lives = [Life(1, END_S)]
        self.log: list[Batch] = []
        self.read_up_to: int | None = None
        self.on_the_way: list[tuple[float, int, Message]] = []
        self.sent = 0
        self.held: set[int] = set()
        self.asked_s: list[float] = []
        self.may_ask_at_once = True
        self.work_ends_s = self.dice.below(2) * END_S or FAULTS_S
        self.reader_starts_s = self.dice.below(2) * self.dice.delay_s(FAULTS_S)
        self.loss = self.dice.delay_s(0.4)
        self.delay_max_s = self.dice.delay_s(4.0)
        self.log_rate = 1 + self.dice.below(20)
        self.restart_odds = self.dice.delay_s(0.03)

    def run(self) -> None:
        while self.now_s < END_S:
            self.now_s += STEP_S
            self.work()
            if self.now_s >= self.reader_starts_s:
                self.read()
        self.check()

    def happens(self, odds: float) -> bool:
        """Whether a fault happens now."""
        return self.now_s < FAULTS_S and self.dice.chance(odds)

    def living(self) -> list[Life]:
        return [life for life in self.lives if life.ends_s >= self.now_s]

    def work(self) -> None:
        if self.happens(self.restart_odds):
            self.lives[-1].ends_s = min(FAULTS_S, self.now_s + self.dice.below(2) * self.dice.delay_s(8))
            self.lives.append(Life(len(self.lives) + 1, END_S))
        for life in self.living():
            for _ in range(self.dice.below(4) if self.now_s < self.work_ends_s else 0):
                batch = life.change(self.dice)
                if not self.happens(self.loss / 4):
                    self.log += [batch] * (1 + self.dice.chance(0.05))
            if self.now_s % 1 == life.epoch % 4 / 4:
                self.send(life.beat())

    def send(self, message: Message) -> None:
        for _ in range(1 + self.dice.chance(0.05)):
            if not self.happens(self.loss):
                self.sent += 1
                delay_s = self.dice.delay_s(self.delay_max_s if self.now_s < FAULTS_S else 0.2)
                heappush(self.on_the_way, (self.now_s + delay_s, self.sent, message))

    def read(self) -> None:
        if self.read_up_to is None:  # the log may have forgotten its beginning
            self.read_up_to = self.dice.below(2) * self.dice.below(len(self.log) + 1)
        rate = self.log_rate if self.now_s < FAULTS_S else 30
        for batch in self.log[self.read_up_to : self.read_up_to + rate]:
            self.read_up_to += 1
            self.hear(batch)
        for message in self.arrived():
            self.hear(message)
        if self.happens(0.01):
            self.follower.on_refused(self.now_s)
        if self.happens(0.01):
            self.follower.on_parked_lost(self.now_s)
        self.follower.tick(self.now_s)
        self.perform([])

    def arrived(self) -> Iterator[Message]:
        while self.on_the_way and self.on_the_way[0][0] <= self.now_s:
            yield heappop(self.on_the_way)[2]

    def hear(self, message: Message) -> None:
        epoch = self.follower.position[0]
        effects = self.effects(message)
        self.may_ask_at_once |= self.follower.position[0] != epoch
        self.perform(effects)

    def effects(self, message: Message) -> list[Effect]:
        match message:
            case Batch():
                return self.follower.on_batch(message, self.now_s)
            case DumpChunk() | ReplayChunk():
                return self.follower.on_answer(message, self.now_s)
            case Heartbeat():
                return self.follower.on_heartbeat(message, self.now_s)
            case RecoverRequest():
                for part in [part for life in self.living() for part in life.answer(message)]:
                    self.send(part)
        return []

    def digest(self, tier: Tier) -> TierDigest:
        self.may_ask_at_once = True
        return SetDigest(self.held if tier is Tier.GPU else ()).of_tier(tier)

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ApplyEvent(event):
                    fold(self.held, event)
                case ReplaceAll(chunks):
                    self.held = {block.sequence_hash for chunk in chunks for block in chunk.blocks()}
                case RepairBuckets(buckets, chunks):
                    self.held = {block for block in self.held if not is_in_buckets(block, buckets)}
                    self.held |= {block.sequence_hash for chunk in chunks for block in chunk.blocks()}
        self.follower.prove(self.digest, self.now_s)
        if self.follower.is_due(self.now_s):
            self.ask()

    def ask(self) -> None:
        asked = self.follower.begin_question(self.now_s)
        is_early = bool(self.asked_s) and self.now_s - self.asked_s[-1] < LIMITS.answer_s
        assert self.may_ask_at_once or not is_early, "one question in flight"
        self.may_ask_at_once = False
        self.asked_s.append(self.now_s)
        place = (0, 0) if asked.wants == "dump" else self.follower.position
        self.send(RecoverRequest(asked.request_id, *place, table(self.held) if asked.wants == "repair" else b""))

    def check(self) -> None:
        truth = self.lives[-1]
        assert self.follower.stale in ("", "behind")  # a pulse may be heard an instant before its batches
        assert self.follower.position == (truth.epoch, truth.last_seq)
        assert self.held == truth.held
        assert [asked_s for asked_s in self.asked_s if asked_s > END_S - 8] == []


def run_all(seeds: range, make: Callable[[FollowerLimits], StreamFollower]) -> None:
    for seed in seeds:
        World(seed, make(LIMITS)).run()


@pytest.mark.parametrize("first", range(0, examples(400), 40))
def test_the_reader_comes_to_rest_with_the_true_set(first: int) -> None:
    run_all(range(first, first + 40), StreamFollower)
