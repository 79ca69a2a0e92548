"""The rules, judged by one start of Prometheus's own tool: every alert fires when it should and only then.

Series are in promtool's notation: `a+bxn` begins at a and grows by b n times, `_xn` are n scrapes without a sample.
"""

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from bench.demo.monitoring import PROMETHEUS, program
from dashboards.command import RULES
from tests.support.paths import ROOT
from tests.system.dashboards.shipped import ALERTS


class Case(NamedTuple):
    """`fires` says how many alerts of the name there are at `at`, of this severity."""

    alert: str
    what: str
    series: dict[str, str]
    fires: int
    at: str
    severity: str = "warning"
    interval: str = "1m"

    def __str__(self) -> str:
        return f"{self.alert}: {self.what}"


def _requests(ok: str, failed: str) -> dict[str, str]:
    labels = 'job="kv-router",instance="r0",model="m",mode="kv"'
    return {
        f'kvrouter_requests_total{{{labels},outcome="ok"}}': ok,
        f'kvrouter_requests_total{{{labels},outcome="failed"}}': failed,
    }


def _in_time(histogram: str, le: str, answers: str, in_time: str) -> dict[str, str]:
    return {f'{histogram}_count{{mode="kv"}}': answers, f'{histogram}_bucket{{mode="kv",le="{le}"}}': in_time}


def _budget_of_times(alert: str, histogram: str, le: str) -> tuple[Case, ...]:
    def seen(answers: str, in_time: str) -> dict[str, str]:
        return _in_time(histogram, le, answers, in_time)

    days = "5m"
    return (
        Case(alert, "80 % late for an hour", seen("0+100x90", "0+20x90"), 1, "90m", "critical"),
        Case(alert, "20 % late for an hour", seen("0+100x90", "0+80x90"), 0, "90m", "critical"),
        Case(alert, "80 % late, an hour ago", seen("0+100x200", "0+20x60 1300+100x140"), 0, "150m", "critical"),
        Case(alert, "8 % late for days", seen("0+100x900", "0+92x900"), 1, "3d", interval=days),
        Case(alert, "8 % late for days, critical", seen("0+100x900", "0+92x900"), 0, "3d", "critical", days),
        Case(alert, "3 % late for days", seen("0+100x900", "0+97x900"), 0, "3d", interval=days),
    )


_FAILURES = "KvRouterFailureBudgetBurns"
BUDGETS = (
    Case(_FAILURES, "2 % for an hour", _requests("0+980x90", "0+20x90"), 1, "90m", "critical"),
    Case(_FAILURES, "0.5 % for an hour", _requests("0+995x90", "0+5x90"), 0, "90m", "critical"),
    Case(_FAILURES, "2 % until half an hour ago", _requests("0+980x95", "0+20x60 1200x35"), 0, "95m", "critical"),
    Case(_FAILURES, "every one of few", _requests("0x90", "0+1x5 5x85"), 0, "60m", "critical"),
    Case(_FAILURES, "no requests", _requests("7x90", "5x90"), 0, "90m", "critical"),
    Case(_FAILURES, "0.2 % for days", _requests("0+4990x900", "0+10x900"), 1, "3d", interval="5m"),
    Case(_FAILURES, "0.2 % for days, critical", _requests("0+4990x900", "0+10x900"), 0, "3d", "critical", "5m"),
    Case(_FAILURES, "0.05 % for days", _requests("0+9995x900", "0+5x900"), 0, "3d", interval="5m"),
    *_budget_of_times("KvRouterFirstTokenBudgetBurns", "kvrouter_time_to_first_token_seconds", "1.6"),
    *_budget_of_times("KvRouterTokenIntervalBudgetBurns", "kvrouter_inter_token_latency_seconds", "0.1"),
)


def _predictions(true: str, answers: str, far_below: str = "0x60") -> dict[str, str]:
    name = "kvrouter_prediction_error_tokens"
    return {
        f'{name}_bucket{{worker="w0",le="-128.0"}}': far_below,
        f'{name}_bucket{{worker="w0",le="128.0"}}': true,
        f'{name}_count{{worker="w0"}}': answers,
    }


_RANK = 'worker="w0",dp_rank="0"'
_APPLIED = f"kvrouter_events_applied_total{{{_RANK}}}"
_FRESHNESS = f"kvrouter_freshness_seconds{{{_RANK}}}"
_ANSWERS = 'kvrouter_prediction_error_tokens_count{worker="w0"}'
_NO_EVENTS = 'kvrouter_worker_parity{worker="w0",field="event_source"}'
_BLOCK_SIZE = 'kvrouter_worker_parity{worker="w0",field="block_size"}'
_MISMATCHES = f"kvrouter_stream_digest_mismatches_total{{{_RANK}}}"
_RESYNCS = f"kvrouter_stream_resyncs_total{{{_RANK}}}"


def _trust(exact: str, degraded: str) -> dict[str, str]:
    name = "kvrouter_rank_trust"
    return {f'{name}{{{_RANK},trust="EXACT"}}': exact, f'{name}{{{_RANK},trust="DEGRADED"}}': degraded}


_WRONG, _TRUST = "KvRouterPredictionsWrong", "KvRouterRankNotExact"
_FRESH, _SILENT = "KvRouterIndexNotFresh", "KvRouterEventsSilent"
_DIGEST, _RESYNC, _SIZE = "KvRouterDigestMismatch", "KvRouterResyncsGoOn", "KvRouterBlockSizeDiffers"
KNOWLEDGE = (
    Case(_WRONG, "30 % too high", _predictions("0+7x60", "0+10x60"), 1, "40m"),
    Case(_WRONG, "30 % too low", _predictions("0+10x60", "0+10x60", "0+3x60"), 1, "40m"),
    Case(_WRONG, "10 % wrong", _predictions("0+9x60", "0+10x60"), 0, "40m"),
    Case(_WRONG, "few answers", _predictions("0x60", "0+1x10 10x50"), 0, "25m"),
    Case(_WRONG, "for 5 minutes", _predictions("0+10x30 300x30", "0+10x60"), 0, "35m"),
    Case(_TRUST, "for long", _trust("0x60", "1x60"), 1, "30m"),
    Case(_TRUST, "for 5 minutes", _trust("1x20 0x40", "0x20 1x40"), 0, "25m"),
    Case(_TRUST, "a worker without events", _trust("0x60", "1x60") | {_NO_EVENTS: "0x60"}, 0, "30m"),
    Case(_FRESH, "3 s", {_FRESHNESS: "3x60", _APPLIED: "0+5x60"}, 1, "20m"),
    Case(_FRESH, "1 s", {_FRESHNESS: "1x60", _APPLIED: "0+5x60"}, 0, "20m"),
    Case(_FRESH, "3 s, and nothing since", {_FRESHNESS: "3x60", _APPLIED: "5x60"}, 0, "20m"),
    Case(_DIGEST, "one", {_MISMATCHES: "0x20 1x40"}, 1, "25m"),
    Case(_DIGEST, "one, an hour ago", {_MISMATCHES: "0x20 1x100"}, 0, "80m"),
    Case(_RESYNC, "one a minute", {_RESYNCS: "0+1x60"}, 1, "30m"),
    Case(_RESYNC, "one", {_RESYNCS: "0x10 1x50"}, 0, "30m"),
    Case(
        _RESYNC,
        "one at each of three routers",
        {f'kvrouter_stream_resyncs_total{{{_RANK},instance="r{n}"}}': "0x10 1x50" for n in range(4)},
        0,
        "30m",
    ),
    Case(_SILENT, "answers", {_ANSWERS: "0+5x60", _APPLIED: "9x60"}, 1, "30m"),
    Case(_SILENT, "answers, never any event", {_ANSWERS: "0+5x60"}, 1, "30m"),
    Case(_SILENT, "answers and events", {_ANSWERS: "0+5x60", _APPLIED: "0+1x60"}, 0, "30m"),
    Case(_SILENT, "no answers", {_ANSWERS: "9x60", _APPLIED: "9x60"}, 0, "30m"),
    Case(_SILENT, "a worker without events", {_ANSWERS: "0+5x60", _NO_EVENTS: "0x60"}, 0, "30m"),
    Case(_SIZE, "it differs", {_BLOCK_SIZE: "0x60"}, 1, "5m", "critical"),
    Case(_SIZE, "it is the same", {_BLOCK_SIZE: "1x60"}, 0, "5m", "critical"),
    Case(_SIZE, "another field differs", {_NO_EVENTS: "0x60"}, 0, "5m", "critical"),
)

_ROUTER = 'job="kv-router",instance="r0"'
_AGENT = 'job="kv-router-agents",instance="a0"'
_CONNECTED = f"kvrouter_log_connected{{{_ROUTER}}}"
_AGE = f"kvrouter_snapshot_age_seconds{{{_ROUTER}}}"
_FAILED_CHECKS = f"kvrouter_snapshot_failures_total{{{_ROUTER}}}"
_LOST = f'kvrouter_journal_lost_records_total{{{_ROUTER},reason="log_away"}}'
_UNCONFIRMED = f"kvrouter_log_publish_failures_total{{{_AGENT}}}"
_CONNECTED_AGENT = f"kvrouter_log_connected{{{_AGENT}}}"
_REFUSES = "KvRouterLogRefuses"
_AWAY, _OLD, _FAIL = "KvRouterLogAway", "KvRouterSnapshotTooOld", "KvRouterSnapshotsFail"
_JOURNAL = "KvRouterJournalLosesRecords"
LOG = (
    Case(_AWAY, "for minutes", {_CONNECTED: "0x20"}, 1, "5m", "critical"),
    Case(_AWAY, "just now", {_CONNECTED: "1x4 0x10"}, 0, "5m", "critical"),
    Case(_REFUSES, "every publication", {_UNCONFIRMED: "0+12x30", _CONNECTED_AGENT: "1x30"}, 1, "20m"),
    Case(
        _REFUSES, "NATS was away", {_UNCONFIRMED: "0+12x30", _CONNECTED_AGENT: "1x3 0 1x3 0 1x3 0 1x3 0 1x3"}, 0, "15m"
    ),
    Case(_REFUSES, "one publication", {_UNCONFIRMED: "0x10 1x30", _CONNECTED_AGENT: "1x40"}, 0, "20m"),
    Case(_OLD, "half an hour, and the log grows", {_AGE: "0+60x60", _APPLIED: "0+5x60"}, 1, "30m"),
    Case(_OLD, "half an hour, and nothing happens", {_AGE: "0+60x60", _APPLIED: "5x60"}, 0, "30m"),
    Case(_OLD, "five minutes", {_AGE: "300x60", _APPLIED: "0+5x60"}, 0, "30m"),
    Case(
        _OLD,
        "another router's is new",
        {_AGE: "0+60x60", 'kvrouter_snapshot_age_seconds{instance="r1"}': "60x60", _APPLIED: "0+5x60"},
        0,
        "30m",
    ),
    Case(_FAIL, "every check", {_FAILED_CHECKS: "0+12x60"}, 1, "30m"),
    Case(_FAIL, "one now and then", {_FAILED_CHECKS: "0+1x60"}, 0, "30m"),
    Case(_JOURNAL, "some", {_LOST: "0x20 7x40"}, 1, "25m"),
    Case(_JOURNAL, "some, an hour ago", {_LOST: "0x20 7x100"}, 0, "80m"),
)


def _refused(reason: str, counts: str) -> dict[str, str]:
    return {f'kvrouter_rejected_total{{{_ROUTER},reason="{reason}"}}': counts}


def _up(labels: str, values: str) -> dict[str, str]:
    return {f"up{{{labels}}}": values}


_BEATS = f"kvrouter_event_loop_lag_seconds_count{{{_ROUTER}}}"
_AGENT_BEATS = f"kvrouter_event_loop_lag_seconds_count{{{_AGENT}}}"
_RESTARTED = f'kvrouter_process_restarts_total{{{_ROUTER},process="serving-1"}}'
_ATTACHED = 'kvrouter_engine_attached{worker="w0"}'
_DEAD = 'kvrouter_engine_dead{worker="w0"}'
_FULL, _GONE, _RESTARTS = "KvRouterQueueSaturated", "KvRouterDown", "KvRouterRestarts"
_PROCESS, _AGENT_GONE, _ENGINE = "KvRouterProcessRestarts", "KvRouterAgentDown", "KvRouterEngineDown"
_BEGAN_ANEW = "0+600x5 0+600x5 0+600x5 0+600x20"
PROCESSES = (
    Case(_FULL, "it goes on", _refused("queue_full", "0+3x60"), 1, "20m", "critical"),
    Case(_FULL, "once", _refused("queue_full", "0x10 3x50"), 0, "20m", "critical"),
    Case(_FULL, "while it stops", _refused("stopping", "0+3x60"), 0, "20m", "critical"),
    Case(_GONE, "for minutes", _up(_ROUTER, "1x5 0x20"), 1, "10m", "critical"),
    Case(_GONE, "up", _up(_ROUTER, "1x20"), 0, "10m", "critical"),
    Case(_GONE, "an agent", _up(_AGENT, "0x20"), 0, "10m", "critical"),
    Case(_RESTARTS, "three times", {_BEATS: _BEGAN_ANEW}, 1, "25m"),
    Case(_RESTARTS, "once", {_BEATS: "0+600x10 0+600x20"}, 0, "25m"),
    Case(_RESTARTS, "an agent", {_AGENT_BEATS: _BEGAN_ANEW}, 0, "25m"),
    Case(_PROCESS, "once", {_RESTARTED: "0x20 1x40"}, 1, "25m"),
    Case(_PROCESS, "an hour ago", {_RESTARTED: "0x20 1x100"}, 0, "80m"),
    Case(_AGENT_GONE, "for minutes", _up(_AGENT, "1x5 0x20"), 1, "10m"),
    Case(_AGENT_GONE, "up", _up(_AGENT, "1x20"), 0, "10m"),
    Case(_AGENT_GONE, "a router", _up(_ROUTER, "0x20"), 0, "10m"),
    Case(_ENGINE, "not healthy", {_ATTACHED: "1x5 0x20"}, 1, "10m"),
    Case(_ENGINE, "dead", {_DEAD: "0x5 1x20"}, 1, "10m"),
    Case(_ENGINE, "healthy", {_ATTACHED: "1x20", _DEAD: "0x20"}, 0, "10m"),
    Case(_ENGINE, "for a minute", {_ATTACHED: "1x8 0x20"}, 0, "10m"),
)

CASES = (*BUDGETS, *KNOWLEDGE, *LOG, *PROCESSES)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first test waits for all

WRONG = [
    case._replace(fires=1 - case.fires, what=f"{case.what}, said wrongly")
    for case in CASES
    if str(case) in {"KvRouterAgentDown: up", "KvRouterAgentDown: for minutes"}
]


def asked(case: Case) -> dict[str, Any]:
    """Return what promtool is asked of a case."""
    labels = f'alertname="{case.alert}",alertstate="firing",severity="{case.severity}"'
    expected = [{"labels": "{}", "value": case.fires}] if case.fires else []
    test = {
        "interval": case.interval,
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "promql_expr_test": [{"expr": f"count(ALERTS{{{labels}}})", "eval_time": case.at, "exp_samples": expected}],
    }
    rules = str(ROOT / "dashboards" / RULES)
    return {"rule_files": [rules], "evaluation_interval": case.interval, "tests": [test]}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what promtool says of each case; that the rules cannot be loaded, it says of all."""
    files = {tmp_path_factory.mktemp("cases") / "case.yaml": case for case in (*CASES, *WRONG)}
    for file, case in files.items():
        file.write_text(yaml.safe_dump(asked(case)))
    command: list[str | Path] = [program("promtool", PROMETHEUS), "test", "rules", *files]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    said = re.split(r"^Unit Testing:\s+(\S+)$", ran.stdout, flags=re.MULTILINE)[1:]
    return {str(files[Path(file)]): verdict.strip() for file, verdict in zip(said[::2], said[1::2], strict=True)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_alert_fires_when_it_should_and_only_then(case: Case, verdicts: dict[str, str]) -> None:
    assert verdicts[str(case)] == "SUCCESS"


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_a_case_that_is_wrong_is_found(case: Case, verdicts: dict[str, str]) -> None:
    assert verdicts[str(case)].startswith("FAILED")


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    every = {(alert.alert, alert.severity) for alert in ALERTS}
    assert {(case.alert, case.severity) for case in CASES if case.fires} == every
    assert {(case.alert, case.severity) for case in CASES if not case.fires} == every
