"""The stream's state machine always comes to rest.

One reader, consolidators that are right, and a network that is not: whatever was lost, late, doubled or said by a
former life, some seconds after the network is well again the reader has the set, knows it, and asks no more.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from random import Random

import pytest

from indexer.follow.follower import FollowerLimits, StreamFollower
from indexer.follow.inputs import ApplyEvent, Effect, RepairBuckets, ReplaceAll
from kv_protocol.digest import SetDigest, TierDigest, bucket_table, is_in_buckets
from kv_protocol.events import TIERS, Batch, Cleared, Event, Removed, Stored, Tier
from kv_protocol.fleet import Heartbeat
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import Answer, BlockColumns, DumpChunk, RecoverRequest, ReplayChunk, block_columns
from tests.support.amount import examples
from tests.unit.indexer.life import Life

LIMITS = FollowerLimits(gap_s=0.0, behind_s=2.0, answer_s=2.0, silent_s=3.0, early_batches_max=16)
STEP_S, FAULTS_S, END_S = 0.25, 30.0, 55.0

Message = Batch | Heartbeat | Answer | RecoverRequest


Held = set[tuple[Tier, int]]
"""The blocks of each tier."""


def fold(held: Held, event: Event) -> Held:
    match event:
        case Stored(blocks, _, _, tier):
            return held | {(tier, block) for block in blocks}
        case Removed(blocks, tier):
            return held - {(tier, block) for block in blocks}
        case Cleared(tier):
            return {each for each in held if each[0] is not tier}


def digest(held: Held, tier: Tier) -> SetDigest:
    return SetDigest(block for of, block in held if of is tier)


def read(chunks: Sequence[BlockColumns]) -> Held:
    return {(tier, block.sequence_hash) for chunk in chunks for block in chunk.blocks() for tier in block.tiers}


class Epoch(Life):
    """A consolidator that is right: one epoch."""

    def __init__(self, epoch: int, ends_s: float, random: Random) -> None:
        super().__init__(WorkerRank("a", 0), random)
        self.begin(epoch)
        self.ends_s = ends_s


class World:
    """Lives, one after another or side by side; a log; a network with faults until `FAULTS_S`; one reader."""

    def __init__(self, seed: int, follower: StreamFollower) -> None:
        self.random, self.follower, self.now_s = Random(seed), follower, 0.0
        self.lives = [Epoch(1, END_S, self.random)]
        self.log: list[Batch] = []
        self.read_up_to: int | None = None
        self.on_the_way: list[tuple[float, int, Message]] = []
        self.sent = 0
        self.held: Held = set()
        self.asked_s: list[float] = []
        self.may_ask_at_once = True
        self.work_ends_s = self.random.choice([END_S, FAULTS_S])
        self.reader_starts_s = self.random.randrange(2) * self.random.uniform(0, FAULTS_S)
        self.loss = self.random.uniform(0, 0.4)
        self.delay_max_s = self.random.uniform(0, 4.0)
        self.log_rate = self.random.randint(1, 20)
        self.restart_odds = self.random.uniform(0, 0.03)

    def run(self) -> None:
        while self.now_s < END_S:
            self.now_s += STEP_S
            self.work()
            if self.now_s >= self.reader_starts_s:
                self.read()
        self.check()

    def happens(self, odds: float) -> bool:
        """Whether a fault happens now."""
        return self.now_s < FAULTS_S and self.random.random() < odds

    def living(self) -> list[Epoch]:
        return [life for life in self.lives if life.ends_s >= self.now_s]

    def work(self) -> None:
        if self.happens(self.restart_odds):
            self.lives[-1].ends_s = min(FAULTS_S, self.now_s + self.random.randrange(2) * self.random.uniform(0, 8))
            self.lives.append(Epoch(len(self.lives) + 1, END_S, self.random))
        for life in self.living():
            for _ in range(self.random.randrange(4) if self.now_s < self.work_ends_s else 0):
                batch = life.batch()
                if not self.happens(self.loss / 4):
                    self.log += [batch] * (1 + (self.random.random() < 0.05))
            if self.now_s % 1 == life.epoch % 4 / 4:
                self.send(life.beat().heartbeat)

    def send(self, message: Message) -> None:
        for _ in range(1 + (self.random.random() < 0.05)):
            if not self.happens(self.loss):
                self.sent += 1
                delay_s = self.random.uniform(0, self.delay_max_s if self.now_s < FAULTS_S else 0.2)
                heappush(self.on_the_way, (self.now_s + delay_s, self.sent, message))

    def read(self) -> None:
        if self.read_up_to is None:  # the log may have forgotten its beginning
            self.read_up_to = self.random.randrange(2) * self.random.randrange(len(self.log) + 1)
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
                for part in [part for life in self.living() for part in life.parts(message)]:
                    self.send(part)
        return []

    def digest(self, tier: Tier) -> TierDigest:
        self.may_ask_at_once = True
        return digest(self.held, tier).of_tier(tier)

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ApplyEvent(event):
                    self.held = fold(self.held, event)
                case ReplaceAll(chunks):
                    self.held = read(chunks)
                case RepairBuckets(buckets, chunks):
                    self.held = {each for each in self.held if not is_in_buckets(each[1], buckets)} | read(chunks)
        self.follower.prove(self.digest, self.now_s)
        if self.follower.question.is_due(self.now_s):
            self.ask()

    def ask(self) -> None:
        asked = self.follower.begin_question(self.now_s)
        is_early = bool(self.asked_s) and self.now_s - self.asked_s[-1] < LIMITS.answer_s
        assert self.may_ask_at_once or not is_early, "one question in flight"
        self.may_ask_at_once = False
        self.asked_s.append(self.now_s)
        place = (0, 0) if asked.wants == "dump" else self.follower.position
        table = bucket_table(digest(self.held, tier).buckets for tier in TIERS) if asked.wants == "repair" else b""
        self.send(RecoverRequest(asked.request_id, *place, table))

    def check(self) -> None:
        truth = self.lives[-1]
        assert self.follower.stale in ("", "behind")  # a pulse may be heard an instant before its batches
        assert self.follower.position == (truth.epoch, truth.seq)
        assert self.held == read(list(block_columns(truth.rows())))
        assert [asked_s for asked_s in self.asked_s if asked_s > END_S - 8] == []


@pytest.mark.parametrize("first", range(0, examples(400), 40))
def test_the_reader_comes_to_rest_with_the_true_set(first: int) -> None:
    for seed in range(first, first + 40):
        World(seed, StreamFollower(LIMITS)).run()
