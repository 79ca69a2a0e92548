"""`router top`: a running fleet on one screen, over a router's control plane.

Answers are validated: what has another form is refused. Fields that are not shown are ignored. The formats are those of
`router/control_plane.py` and of `/metrics`.

exit code   0 the screen was printed     2 not: a wrong flag, no answer, or stopped
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import click
import msgspec
from prometheus_client.parser import text_string_to_metric_families as parsed
from prometheus_client.samples import Sample

from kv_runtime.clock import SystemClock
from kv_runtime.process import print_lines
from router.cli.options import asked, with_source
from router.config import RouterSettings
from router.decision.report import Outcome
from router.doctor.facts import WorkerRow, Workers
from router.doctor.pages import ControlPages, PageUnreadable

DECISIONS = 100
"""How many of the newest decisions are asked for: of these are latencies and hit rates."""
_WORKERS_HEAD = "WORKER         ROLE       STATE    TRUST     REQ QTOKENS BLOCKS HIT% PREFx  DECx"
_DECISIONS_HEAD = "   AGE DECISION     WORKER           TOKENS  HELD   MARGIN     TTFT OUTCOME"
_WORST_FIRST = ("FALLBACK", "DEGRADED", "EXACT")
_LAST = 4
"""Decisions on the screen."""
_SHADOWS_MAX = 3
"""Shadow policies in the head: the first of them."""


class Decision(msgspec.Struct, frozen=True):
    """One of `/v1/decisions`."""

    age_s: float
    decision_id: str
    worker_id: str
    dp_rank: int
    isl_tokens: int
    overlap_blocks: int
    margin: float | None = None
    cost_unit: str = "ms"
    outcome: Outcome | None = None

    def reused_tokens(self, block_size: int) -> int:
        """Return how much of the prompt was reused, or held if the worker did not say."""
        if self.outcome is not None and self.outcome.cached_tokens is not None:
            return self.outcome.cached_tokens
        return min(self.overlap_blocks * block_size, self.isl_tokens)


class Decisions(msgspec.Struct, frozen=True):
    """`/v1/decisions`."""

    decisions: list[Decision]


class Metrics(NamedTuple):
    """Samples of `/metrics` by name."""

    samples: Mapping[str, Sequence[Sample]] = {}

    def found(self, name: str, **labels: str) -> list[Sample]:
        """Return the samples with these labels, among others."""
        return [each for each in self.samples.get(f"kvrouter_{name}", ()) if labels.items() <= each.labels.items()]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with these labels, among others; 0 without any."""
        return sum(each.value for each in self.found(name, **labels))


class Snapshot(NamedTuple):
    """What is known of the fleet; `before` are the metrics `passed_s` seconds before, None: none are known."""

    url: str
    workers: tuple[WorkerRow, ...] = ()
    decisions: tuple[Decision, ...] = ()
    metrics: Metrics = Metrics()
    before: Metrics | None = None
    passed_s: float = 0.0

    def rate(self, name: str, **labels: str) -> float | None:
        """Return by how much a counter grew a second; None if unknown. A restarted router begins anew."""
        if self.before is None or self.passed_s <= 0:
            return None
        return max(0.0, self.metrics.total(name, **labels) - self.before.total(name, **labels)) / self.passed_s

    def hit_ratio(self, worker_id: str) -> float | None:
        """Return the share of prompt tokens that the worker reused, of the newest decisions; None without any.

        Where a worker did not say how many it reused, those count that it held when it was chosen.
        """
        block_size = next((each.registration.block_size for each in self.workers if each.worker_id == worker_id), 0)
        found = [each for each in self.decisions if each.worker_id == worker_id]
        tokens = sum(each.isl_tokens for each in found)
        return sum(each.reused_tokens(block_size) for each in found) / tokens if tokens else None

    def ttft_s(self, quantile: float) -> float | None:
        """Return a quantile of the newest decisions' times to the first token; None if none is known."""
        found = sorted(
            each.outcome.ttft_s
            for each in self.decisions
            if each.outcome is not None and each.outcome.ttft_s is not None
        )
        return found[min(len(found) - 1, int(quantile * len(found)))] if found else None


def screen(snapshot: Snapshot) -> list[str]:
    """Return the fleet's figures, all workers and the last decisions."""
    rows = [_worker_text(snapshot, each) for each in snapshot.workers]
    last = [_decision_text(each) for each in snapshot.decisions[:_LAST]]
    texts = [*_head(snapshot), _WORKERS_HEAD, *rows, "", _DECISIONS_HEAD, *last]
    return [text.rstrip() for text in texts]


def _tail(name: str, width: int) -> str:
    """Return the name, or its end if it is longer: ids of one fleet begin alike."""
    return name if len(name) <= width else f"~{name[1 - width :]}"


def _head(snapshot: Snapshot) -> list[str]:
    metrics = snapshot.metrics
    lines = [
        f"router top  {snapshot.url}",
        (
            f"requests {_rate(snapshot.rate('requests_total'))}  in flight {metrics.total('inflight_requests'):.0f}"
            f"  queued {metrics.total('queued_requests'):.0f}"
            f"  failed {_rate(snapshot.rate('requests_total', outcome='failed'))}"
        ),
        (
            f"TTFT p50 {_seconds(snapshot.ttft_s(0.5))}  p90 {_seconds(snapshot.ttft_s(0.9))}"
            f"  of the newest {len(snapshot.decisions)}"
        ),
    ]
    advised = metrics.found("planner_advised_workers")
    for each in advised[:1]:
        more = f" (and {len(advised) - 1} more groups)" if len(advised) > 1 else ""
        name = f"{each.labels.get('model', '')[:30]} {each.labels.get('role', '')}"
        there = metrics.total("planner_workers", **each.labels)
        lines.append(f"advised workers {name}: {each.value:.0f}, there are {there:.0f}{more}")
    shadows = dict.fromkeys(each.labels.get("shadow", "") for each in metrics.found("shadow_decisions_total"))
    return lines + [_shadow_text(metrics, name) for name in list(shadows)[:_SHADOWS_MAX]]


def _shadow_text(metrics: Metrics, name: str) -> str:
    differ = metrics.total("shadow_decisions_total", shadow=name, verdict="differ")
    count = differ + metrics.total("shadow_decisions_total", shadow=name, verdict="agree")
    live, own = (
        metrics.total("shadow_predicted_ttft_seconds_sum", shadow=name, choice=choice) for choice in ("live", "shadow")
    )
    known = metrics.total("shadow_predicted_ttft_seconds_count", shadow=name, choice="live")
    ttft = f", predicted TTFT {1e3 * (own - live) / known:+.1f}ms" if known else ""
    return f"shadow {_tail(name, 14)}: {differ / max(1.0, count):.0%} of {count:.0f} decisions differ{ttft}"


def _worker_text(snapshot: Snapshot, worker: WorkerRow) -> str:
    metrics, name = snapshot.metrics, worker.worker_id
    trusts = {rank.trust for rank in worker.ranks}
    trust = next((each for each in _WORST_FIRST if each in trusts), "?")
    state = "draining" if worker.draining else "unfit" if worker.unfit else "fit"
    return (
        f"{_tail(name, 14):14} {worker.registration.role[:10]:10} {state:8} {trust:8}"
        f" {metrics.total('ledger_active_requests', worker=name):4.0f}"
        f" {metrics.total('ledger_prefill_tokens_queued', worker=name):7.0f}"
        f" {metrics.total('ledger_active_blocks', worker=name):6.0f}"
        f" {_percent(snapshot.hit_ratio(name)):>4}"
        f" {_factor(metrics, name, 'prefill'):>5}"
        f" {_factor(metrics, name, 'decode'):>5}"
    )


def _decision_text(decision: Decision) -> str:
    outcome = decision.outcome
    margin = "-" if decision.margin is None else f"{decision.margin:.1f}{'ms' if decision.cost_unit == 'ms' else ''}"
    return (
        f"{decision.age_s:5.0f}s {_tail(decision.decision_id, 12):12}"
        f" {_tail(f'{decision.worker_id}/{decision.dp_rank}', 14):14} {decision.isl_tokens:8}"
        f" {decision.overlap_blocks:5} {margin:>8} {_seconds(outcome.ttft_s if outcome else None):>8}"
        f" {outcome.outcome if outcome else 'running'}"
    )


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.1f}ms" if seconds < 1 else f"{seconds:.2f}s"


def _rate(per_s: float | None) -> str:
    return "-" if per_s is None else f"{per_s:.1f}/s"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.0f}"


def _factor(metrics: Metrics, worker: str, work: str) -> str:
    found = metrics.found("rate_factor", worker=worker, work=work)
    return f"{sum(each.value for each in found) / len(found):.2f}" if found else "-"


@click.command()
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.2, 60),
    default=2.0,
    show_default=True,
    help="seconds between two looks",
)
@with_source
def top(*, settings: RouterSettings, url: str, interval_s: float) -> None:
    """Print a running fleet: workers, latencies, the last decisions. `watch router top` shows it again and again.

    Without --router the configured control plane is asked: by default 127.0.0.1, port 8001.

    \b
    Example:  router top --router http://127.0.0.1:8001
    """  # noqa: D301

    async def looked(plane: ControlPages) -> list[str]:
        clock = SystemClock()
        before, before_s = await _metrics(plane), clock.now()
        await clock.sleep(interval_s)
        metrics, passed_s = await _metrics(plane), clock.now() - before_s
        workers = sorted((await plane.page("/v1/workers", Workers)).workers, key=lambda each: each.worker_id)
        decisions = (await plane.page(f"/v1/decisions?limit={DECISIONS}", Decisions)).decisions
        return screen(Snapshot(plane.url, tuple(workers), tuple(decisions), metrics, before, passed_s))

    print_lines(*asked(settings, url, looked))


async def _metrics(plane: ControlPages) -> Metrics:
    samples: dict[str, list[Sample]] = {}
    try:
        for family in parsed((await plane.body("/metrics")).decode()):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample)
    except ValueError as error:
        raise PageUnreadable(f"no metrics ({error})") from error
    return Metrics(samples)
