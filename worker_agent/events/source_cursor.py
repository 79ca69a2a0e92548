"""The reading position in one publisher's stream: each message once, in order; it finds losses and restarts.

With a replay endpoint (a living publisher's ring has at least the newest message, so a replay returns that one)

    frame at the expected sequence        deliver it, and the buffered frames that follow it
    frame above it                        buffer it (bounded), request a replay
    frame below it                        duplicate: ignore
    connection lost, or a live frame      doubt: the publisher may have restarted. Buffer frames; only a replay that is
      that goes back                        requested from now on can end the doubt. If nothing was delivered yet, there
                                            is no doubt: drop the buffer
    frame 2^32 or more ahead              refuse
    replayed frame differs from ours      restart; the frame is of the new epoch, unless the replay was requested before
                                            the doubt: the publisher may have restarted again, so it is dropped
    replay ended below the newest         restart
      sequence seen at its request
    replay ended, a hole lies before its  loss: deliver the buffered frames after the last such hole, report the loss;
      newest frame                          or, if a frame was delivered since the request, request again: a
                                            publisher whose queue is full drops frames of a replay, too
    replay ended, a newer hole is open    request again: messages published after the request are not lost
    replayed frame equals ours, or replay
      ended, and no line above applies    the doubt is over: deliver the buffered frames
    three replays in a row without an     give up: in doubt, take it as a restart; else as a loss, and continue after
      end and without a new frame, or       the last hole
      unsettled for `REPLAY_S`, or a full
      buffer
    silence for `idle_s`                  request a replay, in case the last messages were lost

Without a replay endpoint (ZeroMQ neither repeats nor reorders messages of one connection)

    frame above the expected one          loss: deliver it, report the loss
    frame below it                        restart: deliver it, report the restart
    new connection                        taken as a restart: there is no way to find out

Restart: everything delivered is of an earlier epoch. Report it as lost, expect 0, request a replay from there.
Every replay is requested from the newest delivered message, to compare it. One request is in flight at a time: it ends
with `on_replay_end`, or with `on_no_answer`, after which no frame of it may be passed in.
A loss makes the reader forget all that it read, so it needs no message before the last hole.
Source: `docs/SOURCES.md` E3.1, E3.6; E7 (rows 16, 17, 27).
"""

from typing import NamedTuple

BUFFERED_MAX = 10_000
BUFFERED_BYTES_MAX = 64 << 20
"""Bytes of payloads buffered for one publisher; some minutes of a busy engine."""
REPLAY_S = 60.0
"""How long frames or a doubt may wait for replays; a ring of 10,000 messages is read in a third of this time."""
AHEAD_MAX = 1 << 32
"""Nearly three years of 50 messages a second; a number further ahead is not a sequence of this stream."""
UNANSWERED_MAX = 3


class Delivery(NamedTuple):
    """The result of one input: (sequence, payload) pairs to apply in order.

    `lost`: messages before them are lost for good. `began_anew`: they are lost because the publisher restarted.
    """

    payloads: tuple[tuple[int, bytes], ...] = ()
    lost: bool = False
    began_anew: bool = False


class _Question(NamedTuple):
    """A requested replay. `reach`: the newest sequence seen when it was requested; it must reach that.

    `expected`: the next one to deliver at that time. `in_doubt`: it was requested in the present doubt and can end it.
    `began_anew`: it showed a restart, and continues; earlier messages of the new epoch need another request.
    """

    reach: int
    expected: int
    in_doubt: bool
    began_anew: bool = False


class SourceCursor:
    """The position, and frames buffered after a hole. Without messages for `idle_s` a replay is due."""

    idle_s = 1.0

    def __init__(self, *, has_replay: bool = True) -> None:
        self._has_replay = has_replay
        self._received_at_s = float("-inf")
        self._question: _Question | None = None
        self._asked_since_s: float | None = None
        self._replayed_max = -1
        self._unanswered = 0
        self.gaps_total = self.replays_total = self.lost_total = self.duplicates_total = 0
        self.restarts_total = self.refused_total = 0
        self._begin()

    def _begin(self) -> None:
        self.expected = 0
        """The next sequence to deliver."""
        self._newest: bytes | None = None
        """The payload of the newest delivered message."""
        self._live_newest = -1
        self._buffered: dict[int, bytes] = {}
        self._buffered_bytes = 0
        self._in_doubt = False

    @property
    def is_settled(self) -> bool:
        """Whether no frame and no doubt waits for a replay."""
        return not self._buffered and not self._in_doubt

    @property
    def is_unanswered(self) -> bool:
        """Whether replays were given up, and none has ended since."""
        return self._unanswered >= UNANSWERED_MAX

    def is_overdue(self, now_s: float) -> bool:
        """Return whether the cursor is still unsettled `REPLAY_S` after the first request for a replay."""
        return self._asked_since_s is not None and now_s - self._asked_since_s >= REPLAY_S

    def on_live(self, sequence: int, payload: bytes, now_s: float) -> Delivery:
        """Accept a live message."""
        if self._is_refused(sequence):
            return Delivery()
        goes_back = sequence <= self._live_newest
        self._live_newest = sequence
        if not self._has_replay:
            return self._take_as_it_comes(sequence, payload, goes_back=goes_back)
        if goes_back:
            self.on_disconnect()
        if sequence >= self.expected:
            self._received_at_s = now_s
        if sequence > self.expected and not self._buffered:
            self.gaps_total += 1
        return self._accept(sequence, payload)

    def on_disconnect(self) -> None:
        """Note that the live connection was lost: the publisher may have restarted."""
        self._in_doubt = self._has_replay and self.expected > 0
        if not self._in_doubt:
            self._buffered.clear()
            self._buffered_bytes = 0
            self._question = None
        elif self._question is not None:
            self._question = self._question._replace(in_doubt=False)

    def on_connect(self) -> Delivery:
        """Note that the live connection is established; later messages come over it."""
        if self._has_replay or not self.expected:
            return Delivery()
        self._begin_anew()
        return Delivery(lost=True, began_anew=True)

    def on_replayed(self, sequence: int, payload: bytes) -> Delivery:
        """Accept a replayed message; all older ones that the publisher still has came before it."""
        if self._question is None or self._is_refused(sequence):
            return Delivery()
        self._replayed_max = max(self._replayed_max, sequence)
        ours = self._newest if sequence == self.expected - 1 else self._buffered.get(sequence)
        if ours is None or ours == payload:
            if sequence == self.expected - 1 and self._question.in_doubt:
                self._in_doubt = False
            return self._accept(sequence, payload)
        is_older = self._in_doubt and not self._question.in_doubt
        self._begin_anew()
        if is_older:
            return Delivery(lost=True, began_anew=True)
        self._question = _Question(-1, 0, in_doubt=False, began_anew=True)
        return Delivery(self._accept(sequence, payload).payloads, lost=True, began_anew=True)

    def on_replay_end(self, now_s: float) -> Delivery:
        """End a replay; messages that it should have brought but did not are lost."""
        self._unanswered = 0
        delivery = self._ended(now_s)
        self._note_settled()
        return delivery

    def _ended(self, now_s: float) -> Delivery:
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
        is_lost = question.expected == self.expected <= replayed_max
        return self._lose(replayed_max) if is_lost else Delivery(drained)

    def on_no_answer(self, now_s: float) -> Delivery:
        """Give up a replay that did not end in time; its later frames must not be passed in."""
        question, self._question = self._question, None
        if self.is_overdue(now_s):
            self._unanswered = UNANSWERED_MAX
        elif question is None or question.expected == self.expected:
            self._unanswered += 1
        delivery = self._give_up() if self.is_unanswered else Delivery()
        self._note_settled()
        return delivery

    def _note_settled(self) -> None:
        if self.is_settled:
            self._asked_since_s = None

    def _give_up(self) -> Delivery:
        """Stop waiting for replays."""
        if self._in_doubt:
            self._begin_anew()
            return Delivery(lost=True, began_anew=True)
        return self._lose(max(self._buffered)) if self._buffered else Delivery()

    def next_replay(self, now_s: float) -> int | None:
        """Return the sequence to request a replay from; None if none is due, or one is in flight."""
        if not self._has_replay or self._question is not None:
            return None
        is_idle = now_s - self._received_at_s >= self.idle_s
        if self.is_settled and not is_idle and not self.is_unanswered:
            return None
        if self._asked_since_s is None:
            self._asked_since_s = now_s
        self._question = _Question(max([self.expected - 1, *self._buffered]), self.expected, self._in_doubt)
        self._replayed_max = -1
        self.replays_total += 1
        return max(0, self.expected - 1)

    def _is_refused(self, sequence: int) -> bool:
        is_refused = sequence >= self.expected + AHEAD_MAX
        self.refused_total += is_refused
        return is_refused

    def _take_as_it_comes(self, sequence: int, payload: bytes, *, goes_back: bool) -> Delivery:
        is_lost = sequence > self.expected
        self.gaps_total += is_lost
        self.lost_total += is_lost
        self.restarts_total += goes_back
        self.expected = sequence + 1
        return Delivery(((sequence, payload),), lost=is_lost or goes_back, began_anew=goes_back)

    def _accept(self, sequence: int, payload: bytes) -> Delivery:
        if sequence < self.expected or sequence in self._buffered:
            self.duplicates_total += 1
        else:
            self._buffered[sequence] = payload
            self._buffered_bytes += len(payload)
        drained = () if self._in_doubt else self._drain()
        if len(self._buffered) > BUFFERED_MAX or self._buffered_bytes > BUFFERED_BYTES_MAX:
            return self._give_up()
        return Delivery(drained)

    def _begin_anew(self) -> None:
        self.restarts_total += 1
        self._begin()
        self._question = None
        self._received_at_s = float("-inf")

    def _lose(self, last: int) -> Delivery:
        """Continue after the last hole before `last`, which is buffered."""
        self.lost_total += 1
        while last - 1 in self._buffered:
            last -= 1
        self.expected = last
        self._buffered = {sequence: payload for sequence, payload in self._buffered.items() if sequence >= last}
        self._buffered_bytes = sum(map(len, self._buffered.values()))
        return Delivery(self._drain(), lost=True)

    def _drain(self) -> tuple[tuple[int, bytes], ...]:
        drained = []
        while self.expected in self._buffered:
            self._newest = self._buffered.pop(self.expected)
            self._buffered_bytes -= len(self._newest)
            drained.append((self.expected, self._newest))
            self.expected += 1
        return tuple(drained)
