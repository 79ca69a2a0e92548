"""Circuit breakers of ranks: when one opens after failures, and how it closes. A fold over `AttemptEnded`.

    outcome of an attempt       closed                             open      half-open, and the attempt is the probe
    -------------------------   --------------------------------   -------   ---------------------------------------
    ok (2xx, complete)          earlier failures do not count      nothing   closed, all counts are reset
    client_fault (4xx)          nothing                            nothing   the probe is over, another may go
    cancelled (client left)     nothing                            nothing   the probe is over, another may go
    erred (500 and the like)    nothing yet: see below             nothing   the probe is over, another may go
    back_pressure (429, 503)    no requests for its `Retry-After`  the same  the same, and the probe is over
    failed in phase connect     open at once, its whole worker     nothing   open again, twice as long
    failed (cut, timeout,       one failure more; `failures` in    nothing   open again, twice as long
    502, 504, redirect)         a row within `window_s` open it

    open -> half-open    by time: after `open_s`, doubled with each opening since the last ok, at most `open_s_max`
    half-open            one request at a time is routed there (`Routed`): the probe; for others the rank is unfit. The
                         probe's first token admits them, on probation: the next failure opens the breaker again.
                         Once the probe's lease has ended, another may go. Outcomes of earlier attempts are ignored

Attribution of a 500: a poison request fails on every rank, and three of its kind must not empty a fleet. So a 500
counts against a rank only once another rank has answered the same request (that ok lists it in `erred_before`): it
never counts if all ranks fail the request, or if there is no other.

A failed connection counts against the worker, since all its ranks share one HTTP server; everything else counts
against the rank. So a worker stays excluded while its HTTP is dead, even if its events flow: its probes fail, at
growing intervals. The reverse, HTTP that answers while the stream is in doubt, lowers trust (`trust.py`) and excludes
no rank.
"""

from typing import Literal, NamedTuple

import msgspec

from kv_protocol.ids import WorkerRank
from kv_protocol.journal import AttemptEnded
from kv_protocol.ledger import Cancelled, Expired, Finished, FirstToken, LedgerEvent, Routed

BreakerState = Literal["closed", "open", "half_open"]
BREAKER_STATES: tuple[BreakerState, ...] = ("closed", "open", "half_open")
RETRY_AFTER_DEFAULT_S = 1.0
"""How long a busy worker without a usable `Retry-After` gets no requests."""
RETRY_AFTER_S_MAX = 30.0
"""A longer `Retry-After` is cut to this: later, the worker's answer is too old to count."""

_NEVER_S = float("inf")
_DOUBLINGS_MAX = 32
_Key = tuple[str, int | None]
"""A rank, or a worker id and None: the worker's HTTP."""


class BreakerLimits(NamedTuple):
    """When a breaker opens, and for how long. `failures` in a row within `window_s` seconds open it."""

    failures: int = 3
    window_s: float = 60.0
    open_s: float = 10.0
    open_s_max: float = 120.0


class BreakerStatistics(msgspec.Struct, array_like=True):
    """Openings, closings and back-pressure answers since the start; a row of a checkpoint."""

    opened_total: int = 0
    closed_total: int = 0
    back_pressure_total: int = 0


class Breaker(msgspec.Struct, array_like=True):
    """The breaker of a rank or, if `dp_rank` is None, of a worker's HTTP; also its row in a checkpoint."""

    worker_id: str
    dp_rank: int | None
    failed_at_s: list[float] = []
    open_until_s: float | None = None
    """None: closed."""
    busy_until_s: float = -_NEVER_S
    busy_reason: str = ""
    openings: int = 0
    """How often it has opened since the last ok."""
    probe: str = ""
    """Lease of the present probe of a half-open breaker."""
    last_probe: str = ""
    """Lease of the last probe: the outcome may come after the lease has ended."""
    is_probation: bool = False
    reason: str = ""

    def is_probed_by(self, lease_id: str) -> bool:
        """Return whether the attempt of this lease is the last probe."""
        return bool(lease_id) and lease_id == self.last_probe

    def state(self, now_s: float) -> BreakerState:
        """Return the present state."""
        if self.open_until_s is None:
            return "closed"
        return "open" if now_s < self.open_until_s else "half_open"

    def unfit(self, now_s: float) -> str:
        """Return why no new work goes there; empty if it does."""
        if now_s < self.busy_until_s:
            return self.busy_reason
        if self.open_until_s is None:
            return ""
        if now_s < self.open_until_s:
            return f"breaker open: {self.reason}"
        return f"breaker half-open: one request is trying whether it is over: {self.reason}" if self.probe else ""


class Breakers:
    """All breakers; a rank without failures has none."""

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self.by_key: dict[_Key, Breaker] = {}
        """Empty: all are closed without a failure, and only failed attempts change anything. Others only read it."""
        self.statistics = BreakerStatistics()
        self.changes = 0
        """Increases with every event that may have changed the answer of `unfit`."""

    # ---------------------------------------------------------------- what happened

    def apply(self, ended: AttemptEnded) -> None:
        """Fold in the end of an attempt at a rank of a known worker."""
        rank, now_s, lease_id = (ended.worker_id, ended.dp_rank), ended.now_s, ended.decision_id
        match ended.outcome:
            case "ok":
                self._answered((ended.worker_id, None), now_s, lease_id)
                self._answered(rank, now_s, lease_id)
                for erred in ended.erred_before:
                    self._failed(erred, now_s, "it failed a request that another rank answered", is_news=True)
            case "failed" if ended.phase == "connect":
                http = ended.worker_id, None
                is_news = self._at(http).is_probed_by(lease_id)
                self._failed(http, now_s, _reason(ended), is_news=is_news, at_once=True)
            case "failed":
                self._failed(rank, now_s, _reason(ended), is_news=self._at(rank).is_probed_by(lease_id))
            case "back_pressure":
                self._pressed(rank, now_s, ended.retry_after_s)
            case _:
                pass
        self._probe_over(lease_id)

    def follow(self, event: LedgerEvent, now_s: float) -> None:
        """Fold in an event of a lease of this router; other routers have probes of their own."""
        match event:
            case Routed():
                for breaker in self._of(WorkerRank(event.worker_id, event.dp_rank)):
                    if breaker.state(now_s) == "half_open" and not breaker.probe:
                        breaker.probe = breaker.last_probe = event.lease_id
                        self.changes += 1
            case FirstToken(lease_id=lease_id):
                for breaker in self._probed_by(lease_id):
                    breaker.open_until_s, breaker.is_probation = None, True
                self._probe_over(lease_id)
            case Finished(lease_id=lease_id) | Cancelled(lease_id=lease_id) | Expired(lease_id=lease_id):
                self._probe_over(lease_id)
            case _:
                pass

    def forget(self, worker_id: str) -> None:
        """Drop the breakers of a worker that left or restarted."""
        for key in [key for key in self.by_key if key[0] == worker_id]:
            breaker = self.by_key.pop(key)
            self._probe_over(breaker.probe)
            self.changes += 1

    # ---------------------------------------------------------------- what holds

    def unfit(self, rank: WorkerRank, now_s: float) -> str:
        """Return why the rank takes no new work; empty if it does."""
        if not self.by_key:
            return ""
        return next((reason for each in self._of(rank) if (reason := each.unfit(now_s))), "")

    def valid_until_s(self, now_s: float) -> float:
        """Return the next time at which the answer of `unfit` changes without an event; inf: never."""
        times = (time_s for each in self.by_key.values() for time_s in (each.busy_until_s, each.open_until_s))
        return min((time_s for time_s in times if time_s is not None and time_s > now_s), default=_NEVER_S)

    def state(self, rank: WorkerRank, now_s: float) -> BreakerState:
        """Return the worse of the rank's own breaker and its worker's."""
        states = [each.state(now_s) for each in self._of(rank)]
        return next((state for state in ("open", "half_open") if state in states), "closed")

    def reason(self, rank: WorkerRank, now_s: float) -> str:
        """Return why the breaker opened that gives the rank its `state`; call it only if that is not closed."""
        state = self.state(rank, now_s)
        return next((each.reason for each in self._of(rank) if each.state(now_s) == state), "")

    def restore(self, row: Breaker) -> None:
        """Restore a breaker from a checkpoint, with its probe in flight."""
        self.by_key[row.worker_id, row.dp_rank] = row
        self.changes += 1

    # ---------------------------------------------------------------- transitions

    def _of(self, rank: WorkerRank) -> list[Breaker]:
        found = (self.by_key.get((rank.worker_id, None)), self.by_key.get(rank))
        return [breaker for breaker in found if breaker is not None]

    def _at(self, key: _Key) -> Breaker:
        return self.by_key.setdefault(key, Breaker(*key))

    def _answered(self, key: _Key, now_s: float, lease_id: str) -> None:
        breaker = self.by_key.get(key)
        if breaker is None:
            return
        state = breaker.state(now_s)
        if state == "open" or (state == "half_open" and not breaker.is_probed_by(lease_id)):
            return
        self.statistics.closed_total += breaker.openings > 0
        self.changes += 1
        self._probe_over(breaker.probe)
        del self.by_key[key]
        if now_s < breaker.busy_until_s:
            fresh = self._at(key)
            fresh.busy_until_s, fresh.busy_reason = breaker.busy_until_s, breaker.busy_reason

    def _failed(self, key: _Key, now_s: float, reason: str, *, is_news: bool, at_once: bool = False) -> None:
        breaker, limits = self._at(key), self._limits
        state = breaker.state(now_s)
        if state == "open" or (state == "half_open" and not is_news):
            return
        failed_at_s = breaker.failed_at_s
        failed_at_s.append(now_s)
        del failed_at_s[: -limits.failures]
        in_a_row = len(failed_at_s) == limits.failures and now_s - failed_at_s[0] <= limits.window_s
        if at_once or in_a_row or breaker.is_probation or state == "half_open":
            self._probe_over(breaker.probe)
            breaker.last_probe = ""
            open_s = min(limits.open_s * 2.0 ** min(breaker.openings, _DOUBLINGS_MAX), limits.open_s_max)
            breaker.open_until_s, breaker.reason = now_s + open_s, reason
            breaker.openings += 1
            breaker.is_probation = False
            failed_at_s.clear()
            self.statistics.opened_total += 1
            self.changes += 1

    def _pressed(self, key: _Key, now_s: float, retry_after_s: float | None) -> None:
        wanted_s = RETRY_AFTER_DEFAULT_S if retry_after_s is None else max(0.0, retry_after_s)
        wanted_s = min(wanted_s, RETRY_AFTER_S_MAX)
        breaker = self._at(key)
        if now_s + wanted_s > breaker.busy_until_s:
            breaker.busy_until_s = now_s + wanted_s
            breaker.busy_reason = f"busy: it asked to be left alone for {wanted_s:g} s"
        self.statistics.back_pressure_total += 1
        self.changes += 1

    def _probed_by(self, lease_id: str) -> list[Breaker]:
        return [each for each in self.by_key.values() if each.probe == lease_id] if lease_id else []

    def _probe_over(self, lease_id: str) -> None:
        for breaker in self._probed_by(lease_id):
            breaker.probe = ""
            self.changes += 1


def _reason(ended: AttemptEnded) -> str:
    return ": ".join(each for each in (ended.phase, ended.reason) if each) or "it failed"
