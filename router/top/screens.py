"""A snapshot as lines of text: the screens of `router top`. Pure.

All that came from the network passes `clean`: control characters become `?`, so that no name can move the cursor, and
no line is longer than the screen. Styles are beside the text, never in it: nothing in a name is markup.
"""

import textwrap
from collections.abc import Sequence
from typing import Literal, NamedTuple

from router.top.keys import State, shown_row
from router.top.pages import Decision, Explained, Outcome, Snapshot, Worker

WIDTH, HEIGHT = 80, 24
Style = Literal["", "bold", "reverse", "red", "dim"]
_HELP = {
    "workers": "up/down select  enter open  d decisions  q quit",
    "decisions": "up/down select  enter explain  w workers  q quit",
    "worker": "up/down scroll  esc back  d decisions  q quit",
    "decision": "up/down scroll  esc back  w workers  q quit",
}
_WORKERS_HEAD = "WORKER         ROLE       STATE    TRUST     REQ QTOKENS BLOCKS HIT% PREFx  DECx"
_DECISIONS_HEAD = "   AGE DECISION     WORKER           TOKENS  HELD   MARGIN     TTFT OUTCOME"
_WORST_FIRST = ("FALLBACK", "DEGRADED", "EXACT")
_WRAPPED_MIN = 20
"""Characters; a narrower terminal cuts the lines."""
_LAST = 4
"""Decisions on the screen of the workers."""


class Line(NamedTuple):
    """One line of a screen: text without control characters, and how it is shown."""

    text: str
    style: Style = ""


def clean(text: str) -> str:
    """Return the text with `?` in place of every character that is not printable, as control characters are."""
    return "".join(each if each.isprintable() else "?" for each in text)


def screen(snapshot: Snapshot, state: State, *, width: int = WIDTH, height: int = HEIGHT) -> list[Line]:
    """Return the lines of what is shown now, at most `height`, none longer than `width` characters."""
    head, foot = _head(snapshot), Line(_HELP[state.view], "dim")
    room = max(1, height - len(head) - 1)
    lines = [*head, *_body(snapshot, state, width, room)[:room]][: height - 1]
    return [_fitted(each, width) for each in (*lines, foot)]


def page(snapshot: Snapshot) -> list[Line]:
    """Return all workers and the last decisions as one plain screen, for scripts."""
    rows = [_worker_text(snapshot, each) for each in snapshot.workers]
    last = [_decision_text(each) for each in snapshot.decisions[:_LAST]]
    texts = [_WORKERS_HEAD, *rows, "", _DECISIONS_HEAD, *last]
    return [*_head(snapshot), *(Line(clean(text).rstrip()) for text in texts)]


def _tail(name: str, width: int) -> str:
    """Return the name, or its end if it is longer: ids of one fleet begin alike."""
    return clean(name) if len(name) <= width else f"~{clean(name[1 - width :])}"


def _fitted(line: Line, width: int) -> Line:
    return Line(clean(line.text)[:width], line.style)


# ------------------------------------------------------------------------------------------------- head


def _head(snapshot: Snapshot) -> list[Line]:
    lines = [Line(f"router top  {clean(snapshot.url)}", "bold")]
    if snapshot.problem:
        tries = f"{snapshot.polls_failed} tries" if snapshot.polls_failed > 1 else "trying again"
        older = "; what follows is older" if snapshot.is_known else ""
        lines.append(Line(f"NOT REACHED ({tries}): {clean(snapshot.problem)}{older}", "red"))
    if not snapshot.is_known:
        return lines
    metrics = snapshot.metrics
    lines.append(
        Line(
            f"requests {_rate(snapshot.rate('requests_total'))}  in flight {metrics.total('inflight_requests'):.0f}"
            f"  queued {metrics.total('queued_requests'):.0f}"
            f"  failed {_rate(snapshot.rate('requests_total', outcome='failed'))}"
        )
    )
    first, late = snapshot.ttft_s(0.5), snapshot.ttft_s(0.9)
    lines.append(Line(f"TTFT p50 {_seconds(first)}  p90 {_seconds(late)}  of the newest {len(snapshot.decisions)}"))
    advised = metrics.samples.get("kvrouter_planner_advised_workers", {})
    for labels, count in list(advised.items())[:1]:
        of = dict(labels)
        more = f" (and {len(advised) - 1} more groups)" if len(advised) > 1 else ""
        name = clean(f"{of.get('model', '')[:30]} {of.get('role', '')}")
        there = metrics.total("planner_workers", **of)
        lines.append(Line(f"advised workers {name}: {count:.0f}, there are {there:.0f}{more}"))
    return lines


# ------------------------------------------------------------------------------------------------- lists


def _body(snapshot: Snapshot, state: State, width: int, room: int) -> list[Line]:
    if not snapshot.is_known:
        return []
    if state.view == "workers":
        last = [Line(_decision_text(each)) for each in snapshot.decisions[:_LAST]]
        below = [Line(""), Line(_DECISIONS_HEAD, "bold"), *last] if last and room > 2 * _LAST else []
        rows = [_worker_text(snapshot, each) for each in snapshot.workers]
        return _list(_WORKERS_HEAD, rows, shown_row(state, snapshot), room - len(below)) + below
    if state.view == "decisions":
        rows = [_decision_text(each) for each in snapshot.decisions]
        return _list(_DECISIONS_HEAD, rows, shown_row(state, snapshot), room)
    lines = _worker_page(snapshot, state.of) if state.view == "worker" else _decision_page(snapshot.explained, width)
    first = max(0, min(state.row, len(lines) - room))
    return lines[first:]


def _list(head: str, rows: Sequence[str], selected: int, room: int) -> list[Line]:
    """Return the rows around the selected one, as many as there is room for."""
    count = max(1, room - 1)
    first = max(0, min(selected - count // 2, len(rows) - count))
    lines = [Line(text, "reverse" if at == selected else "") for at, text in enumerate(rows)]
    return [Line(head, "bold"), *lines[first : first + count]]


def _worker_text(snapshot: Snapshot, worker: Worker) -> str:
    metrics, name, role = snapshot.metrics, worker.worker_id, worker.registration.role
    trusts = {rank.trust for rank in worker.ranks}
    trust = next((each for each in _WORST_FIRST if each in trusts), "?")
    state = "draining" if worker.draining else "unfit" if worker.unfit else "fit"
    return (
        f"{_tail(name, 14):14} {clean(role)[:10]:10} {state:8} {trust:8}"
        f" {metrics.total('ledger_active_requests', worker=name):4.0f}"
        f" {metrics.total('ledger_prefill_tokens_queued', worker=name):7.0f}"
        f" {metrics.total('ledger_active_blocks', worker=name):6.0f}"
        f" {_percent(snapshot.hit_ratio(name)):>4}"
        f" {_factor(metrics.of('rate_factor', worker=name, work='prefill')):>5}"
        f" {_factor(metrics.of('rate_factor', worker=name, work='decode')):>5}"
    )


def _decision_text(decision: Decision) -> str:
    outcome = decision.outcome
    margin = "-" if decision.margin is None else f"{decision.margin:.1f}{'ms' if decision.cost_unit == 'ms' else 'b'}"
    return (
        f"{decision.age_s:5.0f}s {_tail(decision.decision_id, 12):12}"
        f" {_tail(f'{decision.worker_id}/{decision.dp_rank}', 14):14} {decision.isl_tokens:8}"
        f" {decision.overlap_blocks:5} {margin:>8} {_seconds(outcome.ttft_s if outcome else None):>8}"
        f" {clean(outcome.outcome) if outcome else 'running'}"
    )


# ------------------------------------------------------------------------------------------------- pages


def _worker_page(snapshot: Snapshot, worker_id: str) -> list[Line]:
    worker = snapshot.worker(worker_id)
    if worker is None:
        return [Line(f"worker {worker_id} has left the fleet", "red")]
    known = worker.registration
    lines = [
        Line(f"worker {worker_id}", "bold"),
        Line(f"  model {known.model}  role {known.role}  version {known.version or '-'}"),
        Line(f"  address {known.base_url}  events from {known.event_source or '-'}"),
        Line(f"  block size {known.block_size} tokens, {known.total_kv_blocks} blocks, {known.max_num_seqs} sequences"),
        Line(
            f"  takes no new work: {worker.unfit}" if worker.unfit else "  takes new work",
            "red" if worker.unfit else "",
        ),
        Line(f"  hit rate of the newest decisions: {_percent(snapshot.hit_ratio(worker_id))} % of prompt tokens"),
        Line("ranks", "bold"),
    ]
    for rank in worker.ranks:
        why = f" ({rank.trust_reason})" if rank.trust_reason else ""
        lines.append(Line(f"  {rank.dp_rank}  {rank.trust}{why}{'  unfit: ' + rank.unfit if rank.unfit else ''}"))
        lines.append(Line(f"     {_rank_load(snapshot, worker_id, str(rank.dp_rank))}"))
    lines += [Line("last decisions", "bold"), Line(_DECISIONS_HEAD)]
    return lines + [Line(_decision_text(each)) for each in snapshot.decisions if each.worker_id == worker_id]


def _rank_load(snapshot: Snapshot, worker: str, dp_rank: str) -> str:
    metrics, of = snapshot.metrics, {"worker": worker, "dp_rank": dp_rank}
    return (
        f"requests {metrics.total('ledger_active_requests', **of):.0f}"
        f"  queued tokens {metrics.total('ledger_prefill_tokens_queued', **of):.0f}"
        f"  blocks {metrics.total('ledger_active_blocks', **of):.0f}"
        f"  prefill x{_factor(metrics.of('rate_factor', work='prefill', **of))}"
        f"  decode x{_factor(metrics.of('rate_factor', work='decode', **of))}"
    )


def _decision_page(explained: Explained | None, width: int) -> list[Line]:
    if explained is None:
        return [Line("asking ...")]
    lines = list[Line]()
    for each in explained.decisions or [explained]:
        for text in each.explanation.splitlines():
            wrapped = textwrap.wrap(clean(text), max(width, _WRAPPED_MIN), subsequent_indent="    ")
            lines += [Line(part) for part in wrapped]
        lines += [Line(_outcome_text(each.outcome)), Line("")]
    return lines


def _outcome_text(outcome: Outcome | None) -> str:
    if outcome is None:
        return "It has not ended yet."
    cached = "-" if outcome.cached_tokens is None else str(outcome.cached_tokens)
    tokens = "-" if outcome.output_tokens is None else str(outcome.output_tokens)
    return (
        f"Outcome {outcome.outcome}: TTFT {_seconds(outcome.ttft_s)}, ITL {_seconds(outcome.itl_s)}, "
        f"whole {_seconds(outcome.duration_s)}, {cached} cached, {tokens} output tokens."
    )


# ------------------------------------------------------------------------------------------------- numbers


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.1f}ms" if seconds < 1 else f"{seconds:.2f}s"


def _rate(per_s: float | None) -> str:
    return "-" if per_s is None else f"{per_s:.1f}/s"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.0f}"


def _factor(factor: float | None) -> str:
    return "-" if factor is None else f"{factor:.2f}"
