"""The reading position in one publisher's stream: in order, without holes, each message once, by epoch.

With a replay endpoint (a living publisher's ring has at least the newest message, so it answers with that one)

    frame at the expected sequence        deliver, and what waited behind it
    frame above it                        keep (bounded), ask for a replay
    frame below it                        a duplicate: nothing
    connection lost, or a live frame      doubt: is it another life now? keep what comes until the answer to a question
      that goes back                        asked after this; where nothing was delivered yet, forget what is kept
    frame 2^32 or more ahead              refused: it is nobody's
    replayed frame unlike ours            the publisher began anew; the frame is its, unless the question is older than
                                            the doubt: then it may be of a third life, and is left out
    replay ended below what we had seen   the publisher began anew
    replay ended, its hole still there    lost: deliver what is kept behind the last such hole, and say so
    replay ended, a younger hole there    ask again: what was published after the question is no loss
    replayed frame like ours, or replay
      ended, and none of these            no doubt any more: deliver what was kept
    three questions without an answer     with a doubt as if it began anew, with a hole as if that were lost
    silence                               ask for a replay, in case the last messages were lost

Without one (ZeroMQ neither repeats nor reorders what comes over a connection)

    frame above the expected one          lost: deliver it, and say so
    frame below it                        the publisher began anew: deliver it, and say so
    another connection than before        as if the publisher began anew: nobody can be asked whether it did

Began anew: what was had is of another life. Say that it is lost, expect 0, ask for what there is from there.
Every question asks from the newest message that was delivered, to compare it. One is in flight at a time: it ends
with `on_replay_end`, or with `on_no_answer`, after which its answer must not be heard any more.
Whoever forgets everything at a loss needs nothing that is older than its last hole.
Source: `docs/SOURCES.md` E3.1, E3.6; E7 (rows 16, 17, 27).
"""

from typing import NamedTuple

BUFFERED_MAX = 10_000
AHEAD_MAX = 1 << 32
"""Three years of 50 messages a second; a sequence further ahead is not one."""
UNANSWERED_MAX = 3


class Delivery(NamedTuple):
    """What one input brought: payloads to apply in order, and whether earlier ones are lost for good before them.

    `began_anew` says that they are lost because they were of another life of the publisher.
    """

    payloads: tuple[tuple[int, bytes], ...] = ()
    lost: bool = False
    began_anew: bool = False


class _Question(NamedTuple):
    """A replay asked for: the newest sequence seen by then, which its answer must reach; and whether in doubt.

    `began_anew`: its answer told of another life, and goes on; what that life had before is to be asked for.
    """

    reach: int
    in_doubt: bool
    began_anew: bool = False


class SourceCursor:
    """The place, and what waits beyond a hole. `next_replay` is the sequence to ask a replay from, when one is due."""

    def __init__(self, *, has_replay: bool = True, idle_s: float = 1.0) -> None:
        self._has_replay = has_replay
        self._idle_s = idle_s
        self._received_at_s = float("-inf")
        self._question: _Question | None = None
        self._replayed_max = -1
        self._unanswered = 0
        self.gaps_total = self.replays_total = self.lost_total = self.duplicates_total = 0
        self.restarts_total = self.refused_total = 0
        self._begin()

    def _begin(self) -> None:
        self._expected = 0
        self._newest: bytes | None = None
        self._live_newest = -1
        self._buffered: dict[int, bytes] = {}
        self._in_doubt = False

    @property
    def expected(self) -> int:
        """The sequence that comes next."""
        return self._expected

    @property
    def is_settled(self) -> bool:
        """Whether nothing waits for a replay."""
        return not self._buffered and not self._in_doubt

    @property
    def is_unanswered(self) -> bool:
        """Whether replays were asked for again and again, and never ended."""
        return self._unanswered >= UNANSWERED_MAX

    def on_live(self, sequence: int, payload: bytes, now_s: float) -> Delivery:
        """A published message came."""
        if self._is_refused(sequence):
            return Delivery()
        goes_back = sequence <= self._live_newest
        self._live_newest = sequence
        if not self._has_replay:
            return self._take_as_it_comes(sequence, payload, goes_back=goes_back)
        if goes_back:
            self.on_disconnect()
        if sequence >= self._expected:
            self._received_at_s = now_s
        if sequence > self._expected and not self._buffered:
            self.gaps_total += 1
        return self._accept(sequence, payload)

    def on_disconnect(self) -> None:
        """The connection of the live line was lost: who speaks from now on may be another."""
        self._in_doubt = self._has_replay and self._expected > 0
        if not self._in_doubt:
            self._buffered.clear()
            self._question = None
        elif self._question is not None:
            self._question = self._question._replace(in_doubt=False)

    def on_connect(self) -> Delivery:
        """The live line has a connection, and what comes from now on comes over it."""
        if self._has_replay or not self._expected:
            return Delivery()
        self._begin_anew()
        return Delivery(lost=True, began_anew=True)

    def on_replayed(self, sequence: int, payload: bytes) -> Delivery:
        """A message of a replay came, and with it all older ones that are still there."""
        if self._question is None or self._is_refused(sequence):
            return Delivery()
        self._replayed_max = max(self._replayed_max, sequence)
        ours = self._newest if sequence == self._expected - 1 else self._buffered.get(sequence)
        if ours is None or ours == payload:
            if sequence == self._expected - 1 and self._question.in_doubt:
                self._in_doubt = False
            return self._accept(sequence, payload)
        is_older = self._in_doubt and not self._question.in_doubt
        self._begin_anew()
        if is_older:
            return Delivery(lost=True, began_anew=True)
        self._question = _Question(-1, in_doubt=False, began_anew=True)
        return Delivery(self._accept(sequence, payload).payloads, lost=True, began_anew=True)

    def on_replay_end(self, now_s: float) -> Delivery:
        """A replay is over; what it should have brought and did not is lost."""
        self._unanswered = 0
        question, replayed_max = self._question, self._replayed_max
        self._question = None
        if question is None or question.began_anew:
            return Delivery()
        self._received_at_s = now_s
        if replayed_max < question.reach:
            self._begin_anew()
            return Delivery(lost=True, began_anew=True)
        self._in_doubt = self._in_doubt and not question.in_doubt
        if self._in_doubt:
            return Delivery()
        drained = self._drain()
        return self._lose(replayed_max) if self._expected <= replayed_max else Delivery(drained)

    def on_no_answer(self) -> Delivery:
        """A replay was asked for and did not end; what still comes of it will not be heard."""
        self._question = None
        self._unanswered += 1
        if not self.is_unanswered:
            return Delivery()
        if self._in_doubt:
            self._begin_anew()
            return Delivery(lost=True, began_anew=True)
        return self._lose(max(self._buffered)) if self._buffered else Delivery()

    def next_replay(self, now_s: float) -> int | None:
        """Return the sequence to ask a replay from, once, when a replay is due."""
        if not self._has_replay or self._question is not None:
            return None
        if self.is_settled and now_s - self._received_at_s < self._idle_s:
            return None
        self._question = _Question(max([self._expected - 1, *self._buffered]), self._in_doubt)
        self._replayed_max = -1
        self.replays_total += 1
        return max(0, self._expected - 1)

    def _is_refused(self, sequence: int) -> bool:
        is_refused = sequence >= self._expected + AHEAD_MAX
        self.refused_total += is_refused
        return is_refused

    def _take_as_it_comes(self, sequence: int, payload: bytes, *, goes_back: bool) -> Delivery:
        is_lost = sequence > self._expected
        self.gaps_total += is_lost
        self.lost_total += is_lost
        self.restarts_total += goes_back
        self._expected = sequence + 1
        return Delivery(((sequence, payload),), lost=is_lost or goes_back, began_anew=goes_back)

    def _accept(self, sequence: int, payload: bytes) -> Delivery:
        if sequence < self._expected or sequence in self._buffered:
            self.duplicates_total += 1
        else:
            self._buffered[sequence] = payload
        if len(self._buffered) > BUFFERED_MAX:
            self._in_doubt = False
            return self._lose(min(self._buffered))
        return Delivery() if self._in_doubt else Delivery(self._drain())

    def _begin_anew(self) -> None:
        self.restarts_total += 1
        self._begin()
        self._question = None
        self._received_at_s = float("-inf")

    def _lose(self, last: int) -> Delivery:
        """Read on behind the last hole before `last`, which is kept."""
        self.lost_total += 1
        while last - 1 in self._buffered:
            last -= 1
        self._expected = last
        self._buffered = {sequence: payload for sequence, payload in self._buffered.items() if sequence >= last}
        return Delivery(self._drain(), lost=True)

    def _drain(self) -> tuple[tuple[int, bytes], ...]:
        drained = []
        while self._expected in self._buffered:
            self._newest = self._buffered.pop(self._expected)
            drained.append((self._expected, self._newest))
            self._expected += 1
        return tuple(drained)
