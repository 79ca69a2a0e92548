"""The closed loop: a journal's requests through engines that are fitted to it, and what follows for its policy.

Engines need `SLOWER` times as long as the prior of the fit.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from bench.placement.regimes import REGIMES, Sizing
from bench.routing.virtual_fleet import VirtualFleet
from bench.routing.virtual_router import TEXT, scaled
from bench.what_if.play import Cell, Played, fitted, play_all, staged
from bench.what_if.recorded import JournalOfOne
from bench.what_if.report import (
    IN_FORCE,
    Result,
    as_object,
    drawn,
    figures,
    lines,
    result_of,
    write_plot,
)
from bench.what_if.tune import proposal, proposal_lines, screened
from kv_protocol.decided import Decided
from kv_protocol.journal import JournalBegan, JournalRecord, decode_journal
from router.decision.policy import Policy
from router.decision.routing import Routing
from router.decision.state import RateFactors, StateSettings
from router.journal.encoder import JournalEncoder
from worker_agent.engines.simulated.timing import H200_8B, IterationWork

LIVE = Policy(mode="kv")
SEED, SLOWER = 1, 2.0
_REQUESTS_MAX = 5000


def journal_of(regime: str, policy: Policy = LIVE, *, scale: float, load: float) -> Sequence[JournalRecord]:
    """Return the journal of a fleet with small caches that serves the regime under the policy."""
    of, encoder = REGIMES[regime], JournalEncoder(1)
    settings = msgspec.to_builtins(StateSettings(text=TEXT))
    encoder.record(JournalBegan(now_s=0.0, router="simulated", started_ns=1, settings=settings))
    workload = of.make(Sizing(SEED, load, scale))
    shape = of.fleet("small", workload)
    VirtualFleet(
        shape._replace(timings=tuple(scaled(each, SLOWER) for each in shape.timings)),
        policy,
        workload.requests,
        seed=SEED,
        follow_ups=workload.follow_ups,
        new_routing=partial(Routing, journal=encoder.journal, recorders=[encoder.record]),
    ).run()
    records = list[JournalRecord]()
    while len(encoder):
        records += decode_journal(encoder.cut().data).records
    return records


def read(of: Sequence[JournalRecord], others: Mapping[str, Mapping[str, Any]]) -> JournalOfOne:
    """Return the journal as it is read, with each other policy asked at its moments."""
    found = JournalOfOne(others, _REQUESTS_MAX, asks=True)
    for record in of:
        found.fold(record)
    return found


def played(of: JournalOfOne, jobs: int = 1) -> Result:
    """Return the policy in force and the others in the closed loop."""
    stage, fleet = staged(of.recorded, H200_8B), of.recorded.fleet
    assert fleet is not None, "a simulated router decides"
    cells = [Cell(name, policy) for name, policy in {IN_FORCE: fleet.policy, **of.policies}.items()]
    return result_of(of.recorded, stage, play_all(stage, cells, jobs))


OTHERS: dict[str, dict[str, Any]] = {
    "predicted-ttft": {"mode": "predicted-ttft"},
    "least-loaded": {"mode": "least-loaded"},
    "round-robin": {"mode": "round-robin"},
    "random": {"mode": "random"},
}


@cache
def journal(policy: Policy = LIVE) -> Sequence[JournalRecord]:
    """Return the journal of a small fleet of chats."""
    return journal_of("chat", policy, scale=0.2, load=0.5)


@cache
def lived() -> tuple[JournalOfOne, Result]:
    """Return the journal of mode kv as it was read, and all policies played."""
    found = read(journal(), OTHERS)
    return found, played(found)


# ------------------------------------------------------------------------------------------------- fidelity


def test_engines_fitted_to_a_simulated_fleet_are_as_fast_as_it_and_serve_its_requests_alike() -> None:
    _, result = lived()
    base = next(each for each in result.played if each.gains is None)
    timing = result.fit.timings[0]
    work = IterationWork(context_tokens=1000, attention_pairs=1e6)
    assert timing.iteration_s(work) / H200_8B.iteration_s(work) == pytest.approx(SLOWER, rel=0.15)
    work = IterationWork(decode_sequences=8, kv_tokens=16_000)
    assert timing.iteration_s(work) / H200_8B.iteration_s(work) == pytest.approx(SLOWER, rel=0.15)
    measured = result.measured
    assert base.figures["ttft_mean_s"].value == pytest.approx(np.mean(measured.ttft_s), rel=0.1)
    assert base.figures["hit_rate"].value == pytest.approx(measured.hit_rate, abs=0.05)


def test_policies_are_ranked_and_that_which_ignores_caches_is_surely_worse() -> None:
    _, result = lived()
    gains = {each.cell.name: each.gains["ttft_mean_s"] for each in result.played if each.gains is not None}
    assert {"least-loaded", "round-robin", "random"} <= {name for name, each in gains.items() if each.low > 0}
    by_ttft = sorted(result.played, key=lambda each: each.figures["ttft_mean_s"].value)
    assert {each.cell.name for each in by_ttft[:2]} == {IN_FORCE, "predicted-ttft"}


# ------------------------------------------------------------------------------------------------- the journal


def test_what_cannot_be_played_is_left_out_and_counted() -> None:
    found = JournalOfOne({}, 1000)
    changes: list[dict[str, Any]] = [{"tried": (("w0", 0),)}, {"phase": "decode"}, {"endpoint": "embeddings"}]
    left, count = iter(changes), 0
    for record in journal():
        if isinstance(record, Decided):
            count += 1
            change = next(left, {}) if count > 1 else {}
            found.fold(replace(record, request=replace(record.request, **change)))
        else:
            found.fold(record)
    assert found.recorded.requests == count - 3
    assert found.recorded.left_out == {"retries": 1, "phases of disaggregated requests": 1, "embeddings": 1}


def test_prompts_share_what_their_recorded_hashes_share() -> None:
    found = read(journal(), {})
    recorded = [record for record in journal() if isinstance(record, Decided)]
    trace = found.recorded.trace()
    assert [each.isl_tokens for each in trace] == [each.request.isl_tokens for each in recorded]
    first = {each.request.sequence_hashes[:8] for each in recorded}
    assert len({each.block_ids[0] for each in trace}) == len(first)
    assert trace[0].arrival_s == 0.0


# ------------------------------------------------------------------------------------------------- the fit


def simulated_speeds(timings: Any) -> list[RateFactors]:
    """Return what the rule would learn of engines with these timings, if it were exact."""
    return [RateFactors(each.token_s / H200_8B.token_s, each.base_s / H200_8B.base_s, 1000, 1000) for each in timings]


def test_each_rank_gets_its_own_speed_and_one_with_few_measurements_the_mean() -> None:
    recorded = [RateFactors(1.0, 2.0, 1000, 1000), RateFactors(3.0, 2.0, 1000, 1000), RateFactors(9.0, 9.0, 0, 0)]
    found = fitted(H200_8B, recorded, simulated_speeds)
    shown = [each.token_s / H200_8B.token_s for each in found.timings]
    assert shown == pytest.approx([1.0, 3.0, 2.0], rel=0.03)
    assert found.left < 1.01


def test_a_fit_says_how_far_its_own_timings_are_from_the_recorded_speeds() -> None:
    def dampened(timings: Any) -> list[RateFactors]:
        return [RateFactors((each.token_s / H200_8B.token_s) ** 0.5, 1.0, 1000, 1000) for each in timings]

    found = fitted(H200_8B, [RateFactors(4.0, 1.0, 1000, 1000)], dampened)
    (speed,) = dampened(found.timings)
    assert found.left == pytest.approx(4.0 / speed.prefill)


# ------------------------------------------------------------------------------------------------- figures


def test_each_draw_has_whole_blocks_of_requests_in_order() -> None:
    for draw in drawn(400)[:20]:
        assert len(draw) == 400
        assert np.all(np.diff(draw.reshape(40, 10), axis=1) == 1)


def test_a_busier_rank_is_an_imbalance() -> None:
    count = 100
    run = Played(
        arrival_s=np.arange(count) / 10,
        end_s=np.arange(count) / 10 + 1,
        worker=np.where(np.arange(count) % 4 == 0, 1, 0),
        isl_tokens=np.full(count, 100.0),
        cached_tokens=np.zeros(count),
        ttft_s=np.full(count, 0.1),
        itl_s=np.full(count, 0.01),
    )
    found = figures(run, ranks=2)
    assert found["imbalance"].value == 1.5
    assert found["requests_per_s"].value == pytest.approx(100 / 10.9)


def test_the_report_names_what_it_does_not_know_and_is_drawn(tmp_path: Any) -> None:
    _, result = lived()
    text = "\n".join(lines(result))
    assert "Under the policy in force the simulation is" in text
    assert "requests come as recorded" in text
    assert {each["name"] for each in as_object(result)["policies"]} == {IN_FORCE, *OTHERS}
    for kind, begins in {"svg": b"<?xml", "png": b"\x89PNG"}.items():
        write_plot(result, tmp_path / f"front.{kind}")
        assert (tmp_path / f"front.{kind}").read_bytes().startswith(begins)


# ------------------------------------------------------------------------------------------------- tune


def test_a_policy_that_draws_at_random_is_tuned_to_one_that_does_not() -> None:
    candidates: dict[str, dict[str, Any]] = {"cold": {"temperature": 0.0}, "turns": {"mode": "round-robin"}}
    found = read(journal(replace(LIVE, temperature=5.0)), candidates)
    assert screened(found.tallies, 1) == ["cold"]
    result = played(found)
    fields = proposal(result, candidates)
    assert fields == {"temperature": 0.0}
    text = "\n".join(proposal_lines(result, fields))
    assert """curl -X PATCH http://127.0.0.1:8001/v1/policy -d '{"temperature": 0.0}'""" in text
    assert "policy:\n    temperature: 0.0" in text
