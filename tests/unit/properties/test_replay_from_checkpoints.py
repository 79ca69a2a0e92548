"""Replay may start at any checkpoint: the decisions and figures that follow are those of a replay from the beginning.

Checkpoints are taken in the middle of random lives and encoded when a life is over, so that one which shares anything
that changes later is found.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_protocol.decided import Decided
from kv_protocol.journal import (
    CheckpointBegan,
    CheckpointEnded,
    CheckpointPart,
    JournalBegan,
    JournalRecord,
    Lost,
    PolicyChanged,
    RankStanding,
    Refused,
)
from router.decision.state import RouterState
from router.journal.encoder import JournalCheckpoint
from router.journal.replay import CheckpointRead, NotFolded, Redecided, Replay
from tests.support.amount import examples
from tests.unit.properties.router_life import POLICIES, SETTINGS, Life, journal
from tests.unit.properties.test_replay import count, statistics_of

EVERY = 50
LIVES = settings(max_examples=examples(10, least=4))

TABLES = ("fleet", *RouterState(SETTINGS).core.tables)


def lived(seed: int, policy: str) -> tuple[Life, list[JournalRecord]]:
    return asyncio.run(journal(seed, POLICIES[policy], EVERY))


def starts(records: Sequence[JournalRecord]) -> list[int]:
    return [at for at, record in enumerate(records) if isinstance(record, CheckpointBegan)]


def taken(records: Sequence[JournalRecord]) -> tuple[Replay, list[Redecided], list[CheckpointRead]]:
    again, decisions, checkpoints = Replay(), list[Redecided](), list[CheckpointRead]()
    for record in records:
        found = again.take(record)
        if isinstance(found, Redecided):
            decisions.append(found)
        elif isinstance(found, CheckpointRead):
            checkpoints.append(found)
    return again, decisions, checkpoints


def rows_of(state: RouterState, now_s: float) -> dict[str, list[Any]]:
    """Return the rows of a checkpoint of the state, by table."""
    began = CheckpointBegan(now_s=now_s, router="router-1", settings={})
    found: dict[str, list[Any]] = {table: [] for table in TABLES}
    for part in JournalCheckpoint(state, began).parts():
        if isinstance(part, CheckpointPart):
            found[part.table] += msgspec.msgpack.decode(part.rows)
    return found


@given(st.integers(0, 2**32), st.sampled_from(sorted(POLICIES)))
@LIVES
def test_from_every_checkpoint_all_that_follows_is_as_from_the_beginning(seed: int, policy: str) -> None:
    life, records = lived(seed, policy)
    whole, now_s = statistics_of(life.state), life.clock.now()
    remembered = list[dict[str, list[Any]]]()
    for at in starts(records):
        again, decisions, (start, *others) = taken(records[at:])
        assert start == CheckpointRead(is_compared=False)
        assert {each.difference for each in others} <= {""}
        assert [each for each in decisions if not each.equal] == []
        assert len(decisions) == count(records[at:], Decided) + count(records[at:], Refused)
        assert again.state is not None
        assert statistics_of(again.state) == whole
        remembered.append(rows_of(again.state, now_s))
    whole_rows = rows_of(life.state, now_s)
    assert [each == whole_rows for each in remembered] == [True] * len(remembered)


@given(st.integers(0, 2**32), st.sampled_from(sorted(POLICIES)))
@LIVES
def test_from_the_beginning_every_checkpoint_is_what_the_records_before_it_come_to(seed: int, policy: str) -> None:
    _, records = lived(seed, policy)
    _, decisions, checkpoints = taken(records)
    assert [each for each in decisions if not each.equal] == []
    assert checkpoints == [CheckpointRead(is_compared=True)] * len(starts(records))


def test_what_was_said_of_ranks_before_a_checkpoint_is_forgotten() -> None:
    for seed in range(4):
        _, records = lived(seed, "kv")
        first = starts(records)[0]
        doubted = [msgspec.structs.replace(each, doubt="behind") for each in records if isinstance(each, RankStanding)]
        _, decisions, _ = taken([*records[:first], *doubted, *records[first:]])
        assert [each.difference for each in decisions if not each.equal] == []


def test_a_life_with_checkpoints_is_the_one_without() -> None:
    with_them, without = (asyncio.run(journal(1, POLICIES["kv"], every))[1] for every in (EVERY, 0))
    decisions = [[each for each in records if isinstance(each, Decided)] for records in (with_them, without)]
    assert decisions[0] == decisions[1]


# ------------------------------------------------------------------------------------------- losses


def test_behind_a_loss_replay_is_exact_again_from_the_next_checkpoint_on() -> None:
    life, records = lived(3, "kv")
    first, second = starts(records)[2:4]
    cut = [*records[: first + 40], Lost(now_s=0.0, count=3), *records[first + 43 :]]
    again, decisions, checkpoints = taken(cut)
    inexact = count(records[first + 43 : second], Decided) + count(records[first + 43 : second], Refused)
    assert [each.is_exact for each in decisions].count(False) == inexact > 0
    assert [each for each in decisions if each.is_exact and not each.equal] == []
    assert [each for each in checkpoints if not each.is_compared] == [CheckpointRead(is_compared=False)]
    assert again.state is not None
    assert statistics_of(again.state) == statistics_of(life.state)


def test_a_checkpoint_with_a_hole_is_no_start_and_the_next_one_is() -> None:
    _, records = lived(3, "kv")
    first, second = starts(records)[2:4]
    ended = next(at for at in range(first, second) if isinstance(records[at], CheckpointEnded))
    for hole in range(first, ended + 1):
        cut = [*records[first:hole], Lost(now_s=0.0, count=1), *records[hole + 1 :]]
        _, decisions, checkpoints = taken(cut)
        before = count(records[hole + 1 : second], Decided) + count(records[hole + 1 : second], Refused)
        assert [each.is_exact for each in decisions] == [False] * before + [True] * (len(decisions) - before)
        assert [each for each in checkpoints if not each.is_compared] == [CheckpointRead(is_compared=False)]


def test_a_checkpoint_of_another_version_is_named_and_is_no_start() -> None:
    _, records = lived(3, "kv")
    at = starts(records)[2]
    place = next(at for at in range(at, len(records)) if isinstance(records[at], CheckpointPart))
    part = records[place]
    assert isinstance(part, CheckpointPart)
    for changed, words in (
        ({"table": "moods"}, "table moods is not known here"),
        ({"rows": b"\x91\x01"}, "table fleet: "),
        ({"rows": b"\xc1"}, "table fleet: "),
    ):
        planted = [*records[at:place], msgspec.structs.replace(part, **changed), *records[place + 1 :]]
        _, _, (read, *_) = taken(planted)
        assert not read.is_compared
        assert words in read.difference


def test_a_checkpoint_without_a_table_is_no_start() -> None:
    _, records = lived(3, "kv")
    at = starts(records)[2]
    place = next(at for at in range(at, len(records)) if isinstance(records[at], CheckpointPart))
    end = next(at for at in range(at, len(records)) if isinstance(records[at], CheckpointEnded))
    ended = records[end]
    assert isinstance(ended, CheckpointEnded)
    fewer = msgspec.structs.replace(ended, parts=ended.parts - 1)
    _, _, (read, *_) = taken([*records[at:place], *records[place + 1 : end], fewer, *records[end + 1 :]])
    assert read == CheckpointRead(is_compared=False, difference="checkpoint: without the tables fleet")


def test_a_checkpoint_that_is_not_what_the_records_before_it_come_to_is_told() -> None:
    _, records = lived(3, "kv")
    second = starts(records)[1]
    at = max(at for at, record in enumerate(records[:second]) if isinstance(record, Decided))
    _, _, checkpoints = taken([*records[:at], *records[at + 1 :]])
    assert checkpoints[0] == CheckpointRead(is_compared=True)
    assert checkpoints[1].is_compared
    assert "is not as the records before it make it" in checkpoints[1].difference


# ------------------------------------------------------------------------------------------- what is planted is found


def planted(
    records: Sequence[JournalRecord], at: int, table: str, change: Callable[[list[Any]], list[Any]]
) -> list[JournalRecord]:
    """Return the journal from its checkpoint at `at` on, with other rows in one of its tables."""
    ended = next(end for end in range(at, len(records)) if isinstance(records[end], CheckpointEnded))
    checkpoint = [
        msgspec.structs.replace(record, rows=msgspec.msgpack.encode(change(msgspec.msgpack.decode(record.rows))))
        if isinstance(record, CheckpointPart) and record.table == table
        else record
        for record in records[at:ended]
    ]
    return [*checkpoint, *records[ended:]]


lived_before = cache(lived)


def is_found(seed: int, policy: str, table: str, change: Callable[[list[Any]], list[Any]]) -> bool:
    """Return whether a replay from some checkpoint with other rows comes to other decisions or figures."""
    life, records = lived_before(seed, policy)
    whole = statistics_of(life.state)
    for at in starts(records):
        again, decisions, (start, *_) = taken(planted(records, at, table, change))
        if start.difference or not all(each.equal for each in decisions):
            return True
        assert again.state is not None
        if statistics_of(again.state) != whole:
            return True
    return False


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.planted
def test_a_checkpoint_that_forgets_a_table_is_found(table: str) -> None:
    assert any(is_found(seed, policy, table, lambda _: []) for seed in range(40) for policy in ("kv", "soft"))


@pytest.mark.parametrize(
    ("kind", "planted"),
    [
        ("policy", PolicyChanged(now_s=1.0, policy={"temperature": "hot"})),
        ("began", JournalBegan(now_s=1.0, router="r", started_ns=1, settings={"lease_s": []})),
        ("checkpoint", CheckpointBegan(now_s=1.0, router="r", settings={})),
    ],
)
def test_a_record_that_cannot_be_folded_is_a_gap_up_to_the_next_checkpoint(kind: str, planted: JournalRecord) -> None:
    _, records = lived(1, "kv")
    middle = len(records) // 2
    at = next(at for at in range(middle, len(records)) if isinstance(records[at], Decided))
    lost_until = next(start for start in starts(records) if start > at)
    before = [] if kind == "checkpoint" else records[:at]  # elsewhere it is compared, and needs no settings
    again = Replay()
    for record in before:
        again.take(record)
    found = again.take(planted)
    assert isinstance(found, NotFolded)
    assert found.kind == kind
    assert "ValidationError" in found.reason
    assert again.state is None
    behind = [again.take(record) for record in records[at:]]
    decisions = [each for each in behind if isinstance(each, Redecided)]
    missing = count(records[at:lost_until], Decided) + count(records[at:lost_until], Refused)
    assert [each.is_exact for each in decisions] == [False] * missing + [True] * (len(decisions) - missing)
    assert [each for each in decisions[missing:] if not each.equal] == []
    assert len(decisions) > missing > 0


def test_the_values_of_a_record_are_cut_short_in_the_reason_why_it_cannot_be_folded() -> None:
    found = Replay().take(JournalBegan(now_s=1.0, router="r", started_ns=1, settings={"x" * 100_000: 1}))
    assert isinstance(found, NotFolded)
    assert len(found.reason) < 500


def test_a_decision_whose_columns_do_not_agree_is_not_equal() -> None:
    _, records = lived(1, "kv")
    at = next(at for at, each in enumerate(records) if isinstance(each, Decided) and each.best and each.overlap)
    told = records[at]
    assert isinstance(told, Decided)
    forged = ({"best": b"\x01"}, {"best": b"\xff\xff"}, {"terms": told.terms[:-1]}, {"costs": bytes(5)})
    for changed in (*forged, {"overlap": told.overlap[:-1]}):
        again = Replay()
        for record in records[:at]:
            again.take(record)
        found = again.take(msgspec.structs.replace(told, **changed))
        assert isinstance(found, NotFolded) or (isinstance(found, Redecided) and found.difference), changed
