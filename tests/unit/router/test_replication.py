"""Rows of the table of replication that a network seldom shows, and the bounds."""

import msgspec
import pytest

from kv_protocol.codec import pack_u64
from kv_protocol.journal import LedgerApplied
from kv_protocol.ledger import (
    BEAT_S,
    BLOCKS_MAX,
    BYTES_MAX,
    EVENTS_MAX,
    PARTS_MAX,
    Cancelled,
    Expired,
    Finished,
    FirstToken,
    LeaseEvent,
    LedgerAsked,
    LedgerBeat,
    LedgerEvent,
    LedgerOpen,
    LedgerTold,
    OpenLease,
    Routed,
    encode_replica,
    lease_digest,
)
from router.replicas import peer
from router.replicas.peer import ASK_AGAIN_S, BUFFERED_MAX, OpenLeases, parts_of, split
from router.replicas.replication import ANSWER_S, PEERS_MAX, PENDING_MAX, SILENT_S, Effect, Outgoing, Replication


def routed(lease_id: str, blocks: int = 1, uncached: int = 7) -> Routed:
    return Routed(
        lease_id=lease_id, worker_id="a", dp_rank=0, blocks=pack_u64(range(1, blocks + 1)), uncached_tokens=uncached
    )


def told(seq: int, *events: LeaseEvent, router: str = "other", life: int = 1) -> LedgerTold:
    return LedgerTold(router=router, life=life, seq=seq, events=events)


def beat(seq: int, *leases: OpenLease, router: str = "other", life: int = 1) -> LedgerBeat:
    known = OpenLeases()
    for lease in leases:
        known.put(lease)
    sums = {name: getattr(known, name) for name in ("digest", "queued_tokens", "blocks")}
    return LedgerBeat(router=router, life=life, seq=seq, leases=len(known), **sums)


def answer(seq: int, number: int, *leases: OpenLease, part: int = 0, parts: int = 1) -> LedgerOpen:
    return LedgerOpen(router="other", life=1, seq=seq, number=number, part=part, parts=parts, leases=leases)


def applied(effects: list[Effect]) -> list[LedgerEvent]:
    return [effect.event for effect in effects if isinstance(effect, LedgerApplied)]


def asked(effects: list[Effect]) -> list[int]:
    return [
        effect.message.number
        for effect in effects
        if isinstance(effect, Outgoing) and isinstance(effect.message, LedgerAsked) and effect.to == "other"
    ]


def replication(*messages: LedgerTold | LedgerBeat | LedgerOpen) -> Replication:
    made = Replication("me", 1)
    for message in messages:
        made.on_message(message, 0.0)
    return made


def test_a_gap_is_asked_for_and_again_until_it_is_answered() -> None:
    made = replication(told(1, routed("l")), told(3, routed("n")))
    assert [asked(made.tick(now_s)) for now_s in (0.0, 0.1, 0.2, 0.3)] == [[1], [], [], [2]]
    assert made.due_s() == 0.3 + ASK_AGAIN_S
    late, lease = answer(3, 1, OpenLease(routed("m"), is_prefilled=False)), OpenLease(routed("m"), is_prefilled=True)
    assert applied(made.on_message(late, 0.3)) == [], "an answer to an earlier question is ignored"
    assert applied(made.on_message(answer(3, 2, lease), 0.3)) == [
        Finished(lease_id="l"),
        routed("m"),
        FirstToken(lease_id="m"),
    ]
    assert made.due_s() == BEAT_S
    assert asked(made.tick(9.0)) == []


def test_what_came_after_the_answer_was_given_is_not_lost() -> None:
    made = replication(told(2, routed("l")))
    assert asked(made.tick(0.0)) == [1]
    assert applied(made.on_message(told(3, routed("m"), Finished(lease_id="l")), 0.0)) == []
    assert applied(made.on_message(answer(2, 1, OpenLease(routed("l"), is_prefilled=False)), 0.0)) == [routed("m")]
    assert applied(made.on_message(told(4, Cancelled(lease_id="m")), 0.0)) == [Cancelled(lease_id="m")]


def test_an_answer_that_newer_messages_overtook_does_not_count() -> None:
    open_a = OpenLease(routed("a"), is_prefilled=False)
    made = replication(told(1, routed("a"), routed("b")), beat(1, open_a))
    assert asked(made.tick(0.0)) == [1]
    for later in (
        told(2, Finished(lease_id="b")),
        beat(2, open_a),
        told(3, Finished(lease_id="a"), routed("c")),
        told(5),
    ):
        made.on_message(later, 0.0)
    assert applied(made.on_message(answer(1, 1, open_a), 0.0)) == []
    assert made.peers["other"].seq == 3


def test_an_answer_counts_when_all_of_it_is_there() -> None:
    made = replication(told(2))
    made.tick(0.0)
    parts = [answer(2, 1, OpenLease(routed(f"l{at}"), is_prefilled=False), part=at, parts=3) for at in range(3)]
    assert [applied(made.on_message(parts[at], 0.0)) for at in (2, 0, 0)] == [[], [], []]
    assert applied(made.on_message(parts[1], 0.0)) == [routed("l2"), routed("l0"), routed("l1")]


def test_as_many_leases_that_are_others_are_found_out_by_their_digest() -> None:
    made = replication(told(1, routed("l"), routed("m")))
    made.on_message(beat(1, OpenLease(routed("l"), is_prefilled=True), OpenLease(routed("m"), is_prefilled=False)), 0.0)
    assert asked(made.tick(0.0)) == [1]
    assert (made.counts["difference"], made.peers["other"].skew.queued_tokens) == (1, 7)


def test_a_prefill_that_is_not_over_after_all_is_taken_back() -> None:
    made = replication(told(1, routed("l"), FirstToken(lease_id="l")), told(3))
    made.tick(0.0)
    lease = OpenLease(routed("l"), is_prefilled=False)
    assert applied(made.on_message(answer(3, 1, lease), 0.0)) == [Finished(lease_id="l"), routed("l")]


def test_while_the_log_is_away_silence_of_peers_means_nothing() -> None:
    made = replication(told(1, routed("l")))
    made.restart_silence(100.0)
    assert applied(made.tick(100.0)) == []
    assert applied(made.tick(100.0 + SILENT_S)) == [Expired(lease_id="l")]


def test_a_former_life_that_speaks_keeps_no_later_one_alive() -> None:
    made = replication(told(1, routed("l"), life=2))
    made.on_message(told(9, life=1), 4.0)
    assert applied(made.tick(SILENT_S)) == [Expired(lease_id="l")]


def test_its_own_echo_says_nothing_and_a_namesake_is_refused() -> None:
    made = Replication("me", 1)
    assert made.on_message(told(1, routed("l"), router="me"), 0.0) == []
    assert made.counts["refused"] == 0
    assert made.on_message(told(1, routed("l"), router="me", life=2), 0.0) == []
    assert made.counts["refused"] == 1


def accompanied(life: int = 1) -> Replication:
    """Return one that has heard another router."""
    made = Replication("me", life)
    made.on_message(beat(0), 0.0)
    return made


def test_a_beat_tells_how_far_was_told_and_comes_in_time() -> None:
    made = accompanied(5)
    made.on_lease_event(routed("l", 3))
    made.on_lease_event(FirstToken(lease_id="l"))
    says = made.tick(0.0)
    assert says == [
        Outgoing(told(1, routed("l", 3), FirstToken(lease_id="l"), router="me", life=5)),
        Outgoing(beat(1, OpenLease(routed("l", 3), is_prefilled=True), router="me", life=5)),
    ]
    assert [len(made.tick(now_s)) for now_s in (BEAT_S - 0.1, BEAT_S, BEAT_S + 0.1)] == [0, 1, 0]


def test_without_peers_only_the_beat_is_sent_with_the_open_leases() -> None:
    made = Replication("me", 1)
    for event in (routed("gone"), routed("l", 3), FirstToken(lease_id="l"), FirstToken(lease_id="gone")):
        made.on_lease_event(event)
    made.on_lease_event(Finished(lease_id="gone"))
    assert made.tick(0.0) == [Outgoing(beat(0, OpenLease(routed("l", 3), is_prefilled=True), router="me"))]
    made.on_lease_event(Finished(lease_id="l"))
    assert made.tick(BEAT_S / 2) == []
    assert made.tick(BEAT_S) == [Outgoing(beat(0, router="me"))]
    made.on_lease_event(routed("m"))
    made.on_message(beat(0), BEAT_S)
    assert made.flush() == [Outgoing(told(1, routed("m"), router="me"))], "the first peer is told what is pending"


def test_a_question_is_answered_with_what_is_open_behind_all_that_was_told() -> None:
    made = accompanied()
    made.on_lease_event(routed("l"))
    effects = made.on_message(LedgerAsked(router="other", number=4), 0.0)
    lease = OpenLease(routed("l"), is_prefilled=False)
    assert effects == [
        Outgoing(told(1, routed("l"), router="me")),
        Outgoing(LedgerOpen(router="me", life=1, seq=1, number=4, part=0, parts=1, leases=(lease,)), "other"),
    ]
    assert made.on_message(LedgerAsked(router="other", number=5), ANSWER_S / 2) == []
    assert len(made.on_message(LedgerAsked(router="other", number=6), ANSWER_S)) == 1


# ---------------------------------------------------------------- bounds


def test_there_are_so_many_routers_and_no_more() -> None:
    made = Replication("me", 1)
    for number in range(PEERS_MAX + 3):
        made.on_message(told(1, routed(f"l{number}"), router=f"r{number}"), 0.0)
    assert (len(made.peers), made.counts["refused"]) == (PEERS_MAX, 3)


def test_of_messages_that_came_too_early_the_newest_are_kept() -> None:
    oldest, newest = 3, 2 + 2 * BUFFERED_MAX
    early = [told(number, routed(f"l{number}")) for number in range(oldest, newest + 1)]
    dropped = newest - BUFFERED_MAX
    for answered, first in ((oldest - 1, newest + 1), (dropped - 1, newest + 1), (dropped, dropped + 1)):
        made = replication(*early)
        assert asked(made.tick(0.0)) == [1]
        news = applied(made.on_message(answer(answered, 1), 0.0))
        assert news == [routed(f"l{number}") for number in range(first, newest + 1)]


@pytest.mark.parametrize(("bound", "room"), [("LEASES_MAX", 2), ("LEASE_BLOCKS_MAX", 4)])
def test_of_a_router_with_more_leases_or_blocks_than_are_kept_the_first_are_and_it_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, bound: str, room: int
) -> None:
    monkeypatch.setattr(peer, bound, room)
    events = [routed(lease_id, 2) for lease_id in "abc"]
    made = replication(told(1, *events[:2]))
    assert applied(made.on_message(told(2, events[2]), 0.0)) == []
    made.on_message(beat(2, *(OpenLease(each, is_prefilled=False) for each in events)), 0.0)
    assert asked(made.tick(9.0)) == []
    made.on_message(beat(2, OpenLease(events[0], is_prefilled=False)), 9.0)
    assert asked(made.tick(9.0)) == [1]


def test_unsent_news_become_a_gap() -> None:
    made, other = accompanied(), Replication("other", 1)
    made.on_lease_event(routed("first"))
    (say,) = made.flush()
    other.on_message(say.message, 0.0)
    for number in range(PENDING_MAX + 1):
        made.on_lease_event(routed(f"l{number}"))
    (effect,) = made.tick(0.0)
    assert isinstance(effect, Outgoing)
    assert isinstance(effect.message, LedgerBeat)
    other.on_message(effect.message, 0.0)
    assert other.counts["gap"] == 1


def test_a_message_is_filled_so_far_and_no_further() -> None:
    many = split([FirstToken(lease_id=f"l{number}") for number in range(2 * EVENTS_MAX)])
    large = split([routed(f"l{number}", 4000) for number in range(30)])
    assert max(map(len, many)) <= EVENTS_MAX
    assert [event.lease_id for events in large for event in events] == [f"l{number}" for number in range(30)]
    assert all(len(encode_replica(told(1, *events))) <= BYTES_MAX for events in (*many, *large))


def test_of_a_very_long_prompt_the_end_is_told_as_blocks_without_a_name() -> None:
    made = accompanied()
    made.on_lease_event(routed("l", BLOCKS_MAX + 5))
    (say,) = made.flush()
    assert isinstance(say.message, LedgerTold)
    (event,) = say.message.events
    assert isinstance(event, Routed)
    assert (len(event.blocks) // 8, event.extra_blocks) == (BLOCKS_MAX, 5)


def test_more_leases_than_an_answer_can_hold_are_told_without_their_blocks_names() -> None:
    longest = routed("l", BLOCKS_MAX)
    numbered = [msgspec.structs.replace(longest, lease_id=f"l{number}") for number in range(PARTS_MAX + 1)]
    parts = parts_of([OpenLease(each, is_prefilled=False) for each in numbered])
    told_leases = [lease.routed for part in parts for lease in part]
    assert len(told_leases) == len(numbered)
    assert {(each.blocks, each.extra_blocks) for each in told_leases} == {(b"", BLOCKS_MAX)}
    assert parts_of([]) == [()], "without leases an answer has one part"


def test_a_digest_tells_leases_apart_and_what_became_of_them() -> None:
    digests = {lease_digest(lease_id, is_prefilled=is_prefilled) for lease_id in "ab" for is_prefilled in (False, True)}
    assert len(digests) == 4
