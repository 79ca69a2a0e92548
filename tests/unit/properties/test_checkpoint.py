"""A checkpoint and the rest of the log are as good as the whole log, wherever it is cut and whatever was going on."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import pytest

from indexer.follow.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint
from indexer.follow.fold import IndexFold, RankView
from indexer.follow.follower import FollowerLimits
from indexer.follow.inputs import Fact, Question, Received, read_message
from indexer.native.index import NativeIndex
from kv_protocol import codec
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import HeldBlock
from tests.support.amount import examples
from tests.unit.indexer.life import Life, unreadable

RANKS = [WorkerRank("a", 0), WorkerRank("a", 1), WorkerRank("b", 0)]
STEPS, QUIET_STEPS, STEP_S = 120, 80, 0.25
SEEDS = range(examples(25, least=8))


class Input(NamedTuple):
    """What every reader receives: facts, and what the consolidators would answer then."""

    facts: list[Fact]
    answers: dict[WorkerRank, Callable[[Question], list[Received]]]


def recorded(life: Life) -> Callable[[Question], list[Received]]:
    """Return a function that answers as the life would now, whatever happens to the life later."""
    now = Life(life.rank, Random(0))
    now.epoch, now.seq, now.held, now.ring = life.epoch, life.seq, dict(life.held), list(life.ring)
    return now.answer


def history(seed: int, *, has_faults: bool) -> tuple[list[Input], dict[WorkerRank, Life]]:
    """Return the inputs of all steps, quarter of a second each; towards the end nothing new happens."""
    random = Random(seed)
    lives = {rank: Life(rank, random) for rank in RANKS}
    inputs = []
    for step in range(STEPS + QUIET_STEPS):
        is_quiet, facts = step >= STEPS, list[Fact]()
        for rank, life in lives.items():
            if has_faults and not is_quiet and random.random() < 0.01:
                life.begin(life.epoch + 1)
            for _ in range(0 if is_quiet else random.randrange(3)):
                data = codec.encode_message([life.batch() for _ in range(random.randint(1, 3))])
                fault = random.random() if has_faults else 1.0
                if fault < 0.05:
                    continue
                facts.append(unreadable(rank) if fault < 0.08 else Received(rank, read_message(data)))
            if step % 4 == 3:
                facts.append(life.beat())
        inputs.append(Input(facts, {rank: recorded(life) for rank, life in lives.items()}))
    return inputs, lives


class Reader:
    """A reader that folds inputs, and asks."""

    def __init__(self) -> None:
        limits = FollowerLimits(early_batches_max=16, backoff_max_s=4.0)
        self.fold = IndexFold(NativeIndex(), limits)
        self.recovering: set[str] = set()

    def take(self, step: int, given: Input, *, hears_answers: bool = True) -> None:
        questions, now_s = list[Question](), step * STEP_S
        for fact in given.facts:
            questions += self.fold.apply(fact, now_s)
        questions += self.fold.tick(now_s)
        while questions:
            question = questions.pop()
            for part in given.answers[question.rank](question) if hears_answers else ():
                questions += self.fold.apply(part, now_s)

    def known(self) -> dict[WorkerRank, tuple[RankView, set[HeldBlock]]]:
        views = self.fold.overlap((), RANKS)
        return {rank: (view, set(self.fold.held(rank))) for rank, view in zip(RANKS, views, strict=True)}


def through_bytes(reader: Reader) -> Checkpoint:
    return decode_checkpoint(encode_checkpoint(reader.fold.checkpoint("created", 1, 2)))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fold_from_a_checkpoint_always_equals_the_uninterrupted_one(seed: int) -> None:
    """Nothing is lost here: not a single question is asked, and nothing differs at any step."""
    inputs, lives = history(seed, has_faults=False)
    cut = Random(seed).randrange(STEPS)
    whole, resumed = Reader(), Reader()
    for step, given in enumerate(inputs):
        whole.take(step, given)
        if step == cut:
            resumed.fold.restore(through_bytes(whole), step * STEP_S)
        elif step > cut:
            resumed.take(step, given)
        if step >= cut:
            assert resumed.known() == whole.known(), f"seed {seed}, step {step}"
    assert {rank: set(life.rows()) for rank, life in lives.items()} == {
        rank: held for rank, (_, held) in resumed.known().items()
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fold_from_a_checkpoint_within_recoveries_ends_in_the_same_state(seed: int) -> None:
    inputs, lives = history(seed, has_faults=True)
    random = Random(seed)
    cuts = sorted(random.sample(range(10, STEPS), 3))
    whole, resumed = Reader(), Reader()
    for step, given in enumerate(inputs):
        hears_answers = step >= STEPS or random.random() < 0.5
        whole.take(step, given, hears_answers=hears_answers)
        if step in cuts:
            resumed.fold.restore(through_bytes(whole), step * STEP_S)
        elif step > cuts[0]:
            resumed.take(step, given, hears_answers=hears_answers)
    assert resumed.known() == whole.known(), f"seed {seed}"
    for rank, life in lives.items():
        assert whole.known()[rank] == (RankView((0,) * 4, life.epoch, life.seq, ""), set(life.rows())), f"seed {seed}"


def test_there_are_checkpoints_in_the_midst_of_recoveries() -> None:
    stale = set()
    for seed in SEEDS:
        inputs, _ = history(seed, has_faults=True)
        random, reader = Random(seed), Reader()
        for step, given in enumerate(inputs[:STEPS]):
            reader.take(step, given, hears_answers=random.random() < 0.5)
            stale |= {place.stale for place in through_bytes(reader).ranks}
    assert stale >= {"", "resyncing"}
