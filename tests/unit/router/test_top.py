"""The screen of `router top` as a pure function."""

from typing import Any

import pytest
from prometheus_client.samples import Sample

from router.cli.top import Decision, Decisions, Metrics, Snapshot, screen
from router.decision.report import Outcome
from router.doctor.facts import RankStatus, WorkerRow, Workers
from router.doctor.pages import PageUnreadable, decoded
from tests.unit.router.samples import registered


def metrics(*found: tuple[str, dict[str, str], float]) -> Metrics:
    """Return these samples: name, labels, value."""
    samples = dict[str, list[Sample]]()
    for name, labels, value in found:
        samples.setdefault(f"kvrouter_{name}", []).append(Sample(f"kvrouter_{name}", labels, value))
    return Metrics(samples)


def worker(worker_id: str = "w0", **changed: Any) -> WorkerRow:
    return WorkerRow(registered(worker_id, block_size=16), [RankStatus(worker_id, 0, "EXACT")], **changed)


def decision(decision_id: str = "d0", **changed: Any) -> Decision:
    fields: dict[str, Any] = {"age_s": 2.0, "worker_id": "w0", "dp_rank": 0}
    sizes = {"isl_tokens": 100, "overlap_blocks": 3}
    return Decision(decision_id=decision_id, **fields | sizes | changed)


def snapshot(**changed: Any) -> Snapshot:
    workers = (worker("w0"), worker("w1", unfit="silent"), worker("w2", draining=True))
    known = Snapshot("http://router", workers=workers, decisions=(decision("d0"), decision("d1")))
    return known._replace(**changed)


# ------------------------------------------------------------------------------------------------- screens


def test_workers_have_their_state_their_load_and_their_rates() -> None:
    at = {"dp_rank": "0", "worker": "w0"}
    shown = screen(
        snapshot(
            metrics=metrics(
                ("ledger_active_requests", at, 7.0),
                ("ledger_prefill_tokens_queued", at, 2048.0),
                ("rate_factor", at | {"work": "prefill"}, 1.25),
                ("rate_factor", at | {"work": "decode"}, 0.75),
            )
        )
    )
    row = next(line for line in shown if line.startswith("w0 "))
    assert row.split() == ["w0", "aggregated", "fit", "EXACT", "7", "2048", "0", "48", "1.25", "0.75"]
    assert [line.split()[2] for line in shown if line.startswith(("w1", "w2"))] == ["unfit", "draining"]


def test_the_head_has_rates_between_two_looks_and_latencies_of_the_newest_decisions() -> None:
    def counted(ok: float, failed: float) -> Metrics:
        return metrics(("requests_total", {"outcome": "ok"}, ok), ("requests_total", {"outcome": "failed"}, failed))

    ended = tuple(decision(outcome=Outcome(outcome="ok", ttft_s=at / 100)) for at in range(10))
    found = snapshot(metrics=counted(29, 3), before=counted(10, 2), passed_s=2.0, decisions=ended)
    head = "\n".join(screen(found)[:4])
    assert "requests 10.0/s" in head
    assert "failed 0.5/s" in head
    assert "TTFT p50 50.0ms  p90 90.0ms" in head
    assert "requests -" in "\n".join(screen(snapshot()))


def test_a_restarted_routers_counters_show_no_negative_rate() -> None:
    before = metrics(("requests_total", {}, 9.0))
    assert snapshot(before=before, passed_s=1.0).rate("requests_total") == 0.0


def test_advised_workers_are_shown_where_a_router_advises() -> None:
    of = {"model": "m", "role": "decode"}
    found = metrics(("planner_advised_workers", of, 3.0), ("planner_workers", of, 2.0))
    assert "advised workers m decode: 3, there are 2" in screen(snapshot(metrics=found))


def test_shadows_are_shown_with_what_they_would_change() -> None:
    of, seconds = {"shadow": "with-a-long-name"}, "shadow_predicted_ttft_seconds"
    found = metrics(
        ("shadow_decisions_total", of | {"verdict": "agree"}, 3e4),
        ("shadow_decisions_total", of | {"verdict": "differ"}, 1e4),
        (f"{seconds}_count", of | {"choice": "live"}, 4e4),
        (f"{seconds}_sum", of | {"choice": "live"}, 2e4),
        (f"{seconds}_sum", of | {"choice": "shadow"}, 1.6e4),
    )
    (line,) = [each for each in screen(snapshot(metrics=found)) if each.startswith("shadow")]
    assert line == "shadow ~h-a-long-name: 25% of 40000 decisions differ, predicted TTFT -100.0ms"
    assert len(line) <= 80


def test_reused_tokens_are_the_workers_count_or_what_it_held() -> None:
    told = decision(outcome=Outcome(outcome="ok", cached_tokens=90))
    assert snapshot(decisions=(told,)).hit_ratio("w0") == 0.9
    assert snapshot(decisions=(decision(),)).hit_ratio("w0") == 0.48
    assert snapshot(decisions=()).hit_ratio("w0") is None


def test_an_ordinary_screen_fits_a_terminal_of_80_characters() -> None:
    assert max(map(len, screen(snapshot()))) <= 80


@pytest.mark.parametrize("kind", [Workers, Decisions])
@pytest.mark.parametrize("body", [b"", b"[]", b'{"workers": 1, "decisions": 1}', b"<html>"])
def test_what_is_no_answer_of_a_router_is_refused(kind: Any, body: bytes) -> None:
    with pytest.raises(PageUnreadable):
        decoded(body, kind, "/v1/workers")
