"""A healthy fleet is never doubted: in virtual time, with caches that evict all the time, and a router that restarts.

The engines are the simulated ones with their real block pools; what they report is compared with what the index
predicted, as the router does. The same fleets with an engine that is wrong are the proof that something is compared.
"""

from collections.abc import Callable
from typing import Any

import pytest

from bench.routing.virtual_fleet import VirtualFleet, VirtualFleetShape
from bench.routing.workloads import SyntheticShape, synthetic_trace
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import OutcomeKnown
from router.decision.policy import Policy
from router.decision.routing import compared_of
from router.decision.verdict import Verdict
from router.fleet.trust import Calibration
from tests.support.watched_routing import Told, WatchedRouting


class Judge:
    """Compares each answer with its prediction; a restarted router has another one."""

    def __init__(self, reported: Callable[[Verdict, int], int]) -> None:
        self.calibration = Calibration()
        self.compared = self.overpredicted = 0
        self._reported = reported
        self._verdicts = dict[str, Verdict]()

    def record(self, what: Told) -> None:
        """See a decision, or its outcome."""
        if isinstance(what, Verdict):
            self._verdicts[what.decision_id] = what
        elif isinstance(what, OutcomeKnown) and what.cached_tokens is not None:
            verdict = self._verdicts.pop(what.decision_id)
            compared = compared_of(verdict, self._reported(verdict, what.cached_tokens))
            if compared is not None:
                self.compared += 1
                self.overpredicted += compared.held_tokens - compared.reported_tokens >= compared.block_size
                self.calibration.apply(compared, what.now_s)


TRACE = synthetic_trace(
    SyntheticShape(
        sessions=60,
        turns=4.0,
        systems=6,
        system_tokens=1024,
        question_tokens=300,
        answer_tokens=60,
        think_s=5.0,
        session_rate=3.0,
    ),
    seed=3,
)
LONGEST = max(each.isl_tokens + each.osl_tokens for each in TRACE)


def live(room: float, seed: int, reported: Callable[[Verdict, int], int] = lambda _, cached: cached) -> list[Judge]:
    """Play the trace on workers with room for so many of its longest requests; return the routers' judges."""
    judges = list[Judge]()

    def judged(*given: Any, **named: Any) -> WatchedRouting:
        judges.append(Judge(reported))
        return WatchedRouting(*given, watch=[judges[-1].record], **named)

    shape = VirtualFleetShape(
        workers=3,
        kv_tokens=(int(room * LONGEST) // 512 + 1) * 512,
        block_size=64,
        lag_s=0.05,
        restart_s=TRACE[len(TRACE) // 2].arrival_s,
    )
    VirtualFleet(shape, Policy(), TRACE, seed=seed, new_routing=judged).run()
    return judges


@pytest.mark.parametrize(("room", "seed"), [(1.2, 3), (1.2, 4), (3.0, 3)])
def test_a_healthy_fleet_is_not_doubted(room: float, seed: int) -> None:
    judges = live(room, seed)
    shown = [(judge.compared, judge.overpredicted, judge.calibration.begun_total) for judge in judges]
    assert sum(judge.compared for judge in judges) > len(TRACE) * 0.9, shown
    assert all(not any(judge.calibration.begun_total.values()) for judge in judges), shown


@pytest.mark.parametrize(
    ("reports", "doubt"),
    [(lambda _cached, _isl_tokens: 0, "overpredicted"), (lambda _cached, isl_tokens: isl_tokens - 1, "underpredicted")],
    ids=["lying", "boasting"],
)
def test_one_wrong_worker_in_such_a_fleet_is_doubted_and_no_other(
    reports: Callable[[int, int], int], doubt: str
) -> None:
    def reported(verdict: Verdict, cached: int) -> int:
        return reports(cached, verdict.request.isl_tokens) if verdict.winner.worker_id == "w0" else cached

    found = [judge.calibration.doubts for judge in live(3.0, 3, reported)]
    assert found == [{WorkerRank("w0", 0): doubt}] * 2
