"""The report of a soak in Markdown."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from bench.report import machine_line
from bench.soak.answers import AnswerOutcome
from bench.soak.verdicts import Soak, growths
from bench.tables import FigureTable, markdown_table


def markdown(soak: Soak, problems: Sequence[str], took_s: float) -> str:
    """Return the tables of a run, and its problems."""
    tables = (_requests(soak), _faults(soak), _growth(soak), _quiet(soak))
    return "\n".join([*_summary(soak, problems, took_s), "", *map(markdown_table, tables)])


def _summary(soak: Soak, problems: Sequence[str], took_s: float) -> Iterator[str]:
    tally = soak.tally
    yield f"{tally.requests:,} requests in {took_s / 60:.1f} minutes ({tally.requests / took_s:.0f}/s), "
    yield f"{tally.tokens:,} tokens checked, {len(soak.faults)} faults. {machine_line()}"
    yield ""
    yield f"* lost: {sum(tally.lost().values())}; ended with an error event because their worker died and they could "
    yield f"  not migrate: {tally.excused()}; right though their worker was killed in the midst: {tally.saved()}"
    yield f"* latency: p50 <= {tally.quantile_s(0.5) * 1000:g} ms, p99 <= {tally.quantile_s(0.99) * 1000:g} ms"
    yield f"* CPU: {_cpu(soak)}"
    yield f"* most leases at once: {soak.leases_peak:g}, of {soak.users} users"
    yield f"* result: {'as it must be' if not problems else f'{len(problems)} problems'}"
    yield from (f"  * {problem}" for problem in problems)


def _cpu(soak: Soak) -> str:
    if len(soak.quiet) <= 1:
        return "one round is too short to tell"
    first, last = soak.quiet[0], soak.quiet[-1]
    requests = last.requests - first.requests
    router_s = last.router.cpu_s - first.router.cpu_s
    steady_s = [last.workers[name].cpu_s - first.workers[name].cpu_s for name in soak.steady]
    workers_s = sum(steady_s) / len(steady_s) * len(last.workers)
    return (
        f"router {1000 * router_s / requests:.2f} ms a request, all workers about {1000 * workers_s / requests:.2f} ms "
        f"(as those that were never ended), clients {1000 * soak.clients_cpu_s / soak.tally.requests:.2f} ms"
    )


def _requests(soak: Soak) -> FigureTable:
    rows = [
        (name, *(f"{counts.get(outcome, 0):,}" for outcome in AnswerOutcome))
        for name, counts in sorted(soak.tally.rows())
    ]
    totals = ("all", *(f"{soak.tally.total(outcome):,}" for outcome in AnswerOutcome))
    return FigureTable("requests", ("request", *AnswerOutcome), [*rows, totals])


def _faults(soak: Soak) -> FigureTable:
    rows = []
    by_kind = sorted(soak.faults, key=lambda each: each.fault.kind)
    for kind, healed in groupby(by_kind, key=lambda each: each.fault.kind):
        times_s = sorted(each.healed_s for each in healed)
        rows.append((kind, f"{len(times_s)}", f"{times_s[len(times_s) // 2]:.1f}", f"{times_s[-1]:.1f}"))
    return FigureTable("faults", ("fault", "times", "healed in s, median", "at most"), rows)


def _growth(soak: Soak) -> FigureTable:
    columns = ("process", "figure", "after a tenth", "at the end", "growth", "allowed")
    rows = [
        (each.process, each.figure, *(f"{number:,.0f}" for number in (each.first, each.last, each.by, each.allowed)))
        for each in growths(soak)
    ]
    return FigureTable("growth", columns, rows)


_METRICS = ("ledger_active_requests", "inflight_requests", "http_connections", "journal_unpublished_records")


def _quiet(soak: Soak) -> FigureTable:
    rows = [
        (
            f"{each.requests:,}",
            f"{each.router.rss_bytes >> 20}",
            f"{each.router.descriptors}",
            *(f"{each.metrics[name]:g}" for name in _METRICS),
            f"{each.nats.rss_bytes >> 20}",
            f"{each.store_bytes >> 20}",
            f"{max(took.rss_bytes for took in each.workers.values()) >> 20}",
            "differs" if each.verified else "equal",
        )
        for each in soak.quiet
    ]
    columns = (
        *("requests", "router MiB", "descriptors", *_METRICS),
        *("nats-server MiB", "store MiB", "largest worker MiB", "indexer verify"),
    )
    return FigureTable("at quiet moments", columns, rows)
