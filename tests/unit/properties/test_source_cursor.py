"""Hop A, whatever happens to it: each payload once and in order; and a publisher that began anew never goes unnoticed.

The world is a publisher's ring (of one life after the other), a live line that drops, doubles and swaps, and replays
that come in the middle of anything.
"""

from collections.abc import Callable

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.amount import examples
from worker_agent.events.source_cursor import Delivery, SourceCursor

Fate = tuple[str, int]
FATES = st.lists(
    st.tuples(
        st.sampled_from(["live", "live", "live", "drop", "double", "swap", "ask", "answer", "silence"]),
        st.integers(0, 9),
    ),
    max_size=60,
)
LIVES = st.lists(st.tuples(FATES, st.booleans()), min_size=1, max_size=3)
IDLE_S = 1.0


class Hop:
    """One publisher as its reader meets it. What is applied is `(life, sequence)`, forgotten at a loss."""

    def __init__(self, cursor: SourceCursor, ring: int = 1_000_000) -> None:
        self.cursor, self._ring = cursor, ring
        self.life = self.sequence = 0
        self.now_s = 0.0
        self.applied: list[tuple[int, int]] = []
        self.losses = self.lives_noticed = 0
        self._held_back: int | None = None
        self._answers: list[tuple[int, bytes]] | None = None

    def suffer(self, fates: list[Fate]) -> None:
        for what, number in fates:
            getattr(self, f"_{what}")(number)

    def restart(self, *, answer_is_lost: bool) -> None:
        """What was on the live line has come, then its connection is lost; an answer may still be on its way."""
        self._swap_in()
        self.cursor.on_disconnect()
        self.life, self.sequence = self.life + 1, 0
        if self._answers is not None and answer_is_lost:
            self._answers = None
            self._take(self.cursor.on_no_answer(self.now_s))

    def calm(self) -> None:
        """Nothing more is published; every question is answered."""
        self._swap_in()
        for _ in range(8):
            self._silence(0)
            self._ask(0)
            while self._answers is not None:
                self._answer(9)

    def _payload(self, sequence: int) -> bytes:
        return f"{self.life} {sequence}".encode()

    def _publish(self) -> int:
        self.now_s += 0.1
        self.sequence += 1
        return self.sequence - 1

    def _arrive(self, sequence: int) -> None:
        self._take(self.cursor.on_live(sequence, self._payload(sequence), self.now_s))

    def _live(self, _: int) -> None:
        self._arrive(self._publish())
        self._swap_in()

    def _drop(self, _: int) -> None:
        self._publish()

    def _double(self, back: int) -> None:
        self._arrive(self._publish())
        self._arrive(max(0, self.sequence - 1 - back))

    def _swap(self, _: int) -> None:
        self._swap_in()
        self._held_back = self._publish()

    def _swap_in(self) -> None:
        if self._held_back is not None:
            sequence, self._held_back = self._held_back, None
            self._arrive(sequence)

    def _silence(self, _: int) -> None:
        self.now_s += IDLE_S

    def _ask(self, _: int) -> None:
        start = None if self._answers is not None else self.cursor.next_replay(self.now_s)
        if start is not None:
            oldest = max(start, self.sequence - self._ring)
            self._answers = [(sequence, self._payload(sequence)) for sequence in range(oldest, self.sequence)]

    def _answer(self, messages: int) -> None:
        """Some of the answer comes, and its end when nothing else is left."""
        if self._answers is None:
            return
        coming, self._answers = self._answers[:messages], self._answers[messages:]
        for sequence, payload in coming:
            self._take(self.cursor.on_replayed(sequence, payload))
        if not self._answers and len(coming) < messages:
            self._answers = None
            self._take(self.cursor.on_replay_end(self.now_s))

    def _take(self, delivery: Delivery) -> None:
        assert delivery.lost or not delivery.began_anew
        if delivery.lost:
            self.losses += 1
            self.lives_noticed += delivery.began_anew
            self.applied.clear()
        for sequence, payload in delivery.payloads:
            life, named = map(int, payload.split())
            assert named == sequence
            self.applied.append((life, sequence))


def check_once_and_in_order(make: Callable[[], SourceCursor], fates: list[Fate]) -> None:
    hop = Hop(make())
    hop.suffer(fates)
    hop.calm()
    assert hop.applied == [(0, sequence) for sequence in range(hop.sequence)]
    assert (hop.losses, hop.cursor.is_settled) == (0, True)


def check_bounded_ring(make: Callable[[], SourceCursor], fates: list[Fate], ring: int) -> None:
    hop = Hop(make(), ring)
    hop.suffer(fates)
    hop.calm()
    count = len(hop.applied)
    assert hop.applied == [(0, sequence) for sequence in range(hop.sequence - count, hop.sequence)]
    assert count == hop.sequence or hop.losses
    assert (hop.lives_noticed, hop.cursor.is_settled) == (0, True)


def check_restarts(make: Callable[[], SourceCursor], lives: list[tuple[list[Fate], bool]]) -> None:
    hop = Hop(make())
    for fates, answer_is_lost in lives:
        hop.suffer(fates)
        hop.restart(answer_is_lost=answer_is_lost)
    hop.suffer(lives[0][0])
    hop.calm()
    assert hop.applied == [(hop.life, sequence) for sequence in range(hop.sequence)]
    assert hop.cursor.is_settled


def check_connections(make: Callable[[], SourceCursor], heard: list[list[int]]) -> None:
    """Of each life some messages are heard, in order; then its connection ends, and the next one's begins."""
    cursor, applied = make(), list[int]()
    for life, sequences in enumerate(heard):
        if cursor.on_connect().lost:
            applied.clear()
        for sequence in sorted(sequences):
            delivery = cursor.on_live(sequence, f"{life} {sequence}".encode(), 0.0)
            if delivery.lost:
                applied.clear()
            applied.append(life)
        cursor.on_disconnect()
        assert set(applied) <= {life}


@given(FATES)
@settings(max_examples=examples(200))
def test_with_a_ring_that_has_all_each_payload_is_had_once_and_in_order(fates: list[Fate]) -> None:
    check_once_and_in_order(SourceCursor, fates)


@given(FATES, st.integers(1, 5))
@settings(max_examples=examples(200))
def test_with_a_small_ring_what_is_had_since_the_last_loss_has_no_hole(fates: list[Fate], ring: int) -> None:
    check_bounded_ring(SourceCursor, fates, ring)


@example([([("drop", 0), ("ask", 0), ("live", 0)], False)])  # the answer comes when its question was given up
@example(  # the answer is of a life that is over, too
    [([("drop", 0), ("answer", 1), ("live", 0)], False), ([("live", 0)], False), ([("live", 0), ("ask", 0)], False)]
)
@given(LIVES)
@settings(max_examples=examples(200))
def test_a_publisher_that_begins_anew_at_any_point_is_noticed_and_had_whole(
    lives: list[tuple[list[Fate], bool]],
) -> None:
    check_restarts(SourceCursor, lives)


@given(st.lists(st.integers(0, 12), min_size=2, max_size=5), st.sets(st.integers(0, 40)))
@settings(max_examples=examples(200))
def test_without_replay_every_hole_and_every_life_that_goes_back_is_a_loss(
    counts: list[int], dropped: set[int]
) -> None:
    cursor, live_newest, applied = SourceCursor(has_replay=False), -1, list[tuple[int, int]]()
    published = ((life, sequence) for life, count in enumerate(counts) for sequence in range(count))
    for at, (life, sequence) in enumerate(published):
        if at in dropped:
            continue
        delivery = cursor.on_live(sequence, f"{life} {sequence}".encode(), 0.0)
        assert delivery.payloads == ((sequence, f"{life} {sequence}".encode()),)
        assert delivery.lost == (sequence != live_newest + 1)
        assert delivery.began_anew == (sequence <= live_newest)
        live_newest = sequence
        applied.append((life, sequence))
    assert cursor.next_replay(1000.0) is None


@given(st.lists(st.lists(st.integers(0, 12), unique=True), min_size=2, max_size=4))
@settings(max_examples=examples(200))
def test_without_replay_two_lives_on_two_connections_are_never_mixed(heard: list[list[int]]) -> None:
    check_connections(lambda: SourceCursor(has_replay=False), heard)
