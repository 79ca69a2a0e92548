"""The dashboard "Fleet": health, latencies, cache savings and objectives."""

from dashboards.fleet_load import QUEUE, WAITING
from dashboards.fleet_troubles import FAILURES, REPLICAS
from dashboards.objectives import (
    ANSWERED_OBJECTIVE,
    FAILED,
    FIRST_TOKEN_OBJECTIVE,
    FIRST_TOKEN_S,
    FIRST_TOKENS,
    TOKEN_INTERVAL_OBJECTIVE,
    TOKEN_INTERVAL_S,
    TOKEN_INTERVALS,
    Objective,
)
from dashboards.panels import Board, Panel, Query, Row
from dashboards.promql import MODEL, WORKER, burn, rate, selected, share

_WINDOWS = ("5m", "1h", "6h")


def _answers_burn(over: str) -> Query:
    bad, total = rate("requests_total", MODEL, FAILED, over=over), rate("requests_total", MODEL, over=over)
    return Query(burn(bad, total, 1 - ANSWERED_OBJECTIVE), over)


def _burns(objective: Objective) -> tuple[Query, ...]:
    allowed = 1 - objective.kept
    return tuple(
        Query(burn(objective.bad(rate, over), rate(objective.total, over=over), allowed), over) for over in _WINDOWS
    )


SERVING = Row(
    "Is it serving?",
    (
        Panel(
            title="Requests by outcome",
            description="kvrouter_requests_total: ok, refused (4xx), failed, cancelled (the client left). failed: go "
            'on to "What fails?"; refused: clients send what cannot be served, the answers name the '
            "field.",
            queries=(Query(rate("requests_total", MODEL, by="outcome"), "{{outcome}}"),),
            kind="stacked",
            unit="reqps",
        ),
        Panel(
            title="Requests by model",
            description="kvrouter_requests_total. unknown: names that no worker serves; GET /v1/models lists those "
            "that are.",
            queries=(Query(rate("requests_total", MODEL, by="model"), "{{model}}"),),
            unit="reqps",
        ),
        Panel(
            title="In flight, and in the queue",
            description="kvrouter_inflight_requests, kvrouter_queued_requests. In flight near "
            "queue.inflight_requests_max: raise it, or add routers. A queue that does not empty: add "
            "workers.",
            queries=(
                Query(f"sum({selected('inflight_requests')})", "in flight"),
                Query(f"sum({selected('queued_requests')})", "in the queue"),
            ),
        ),
        Panel(
            title="Failed requests",
            description="kvrouter_requests_total, those that failed, of all. Above 0: what failed stands below; the "
            "router's log names worker, phase and reason.",
            queries=(Query(share(rate("requests_total", MODEL, FAILED), rate("requests_total", MODEL)), "failed"),),
            kind="stat",
            unit="percentunit",
            width=6,
            height=5,
            bad_from=1 - ANSWERED_OBJECTIVE,
        ),
        Panel(
            title="Workers that take work",
            description="kvrouter_rank_fit and kvrouter_workers: fit of those registered. Fewer fit than registered: "
            "GET /v1/workers says of each why (draining, silent, breaker open).",
            queries=(
                Query(f"sum(max by (worker) ({selected('rank_fit')}))", "fit"),
                Query(f"max({selected('workers')})", "registered"),
            ),
            kind="stat",
            unit="none",
            width=6,
            height=5,
        ),
        Panel(
            title="Policy",
            description="kvrouter_policy_info: how each router chooses now. Replicas that differ: a PATCH /v1/policy "
            "reached only some of them.",
            queries=(Query(f"sum by (mode) ({selected('policy_info')})", "{{mode}}"),),
            kind="stat",
            unit="none",
            width=6,
            height=5,
        ),
        Panel(
            title="Tokens a second",
            description="kvrouter_input_tokens and kvrouter_output_tokens: prompts answered, and answers. What the "
            "fleet is asked to do; compare with what its engines can.",
            queries=(
                Query(rate("input_tokens_sum"), "in"),
                Query(rate("output_tokens_sum"), "out"),
            ),
            unit="cps",
            width=6,
            height=5,
        ),
    ),
)


CACHES = Row(
    "What do caches save?",
    (
        Panel(
            title="Hit rate",
            description="kvrouter_actual_cached_tokens_total of kvrouter_input_tokens: the share of prompt tokens "
            "that workers reused. Lower than the workload allows: the policy, or caches that are too "
            "small.",
            queries=(Query(share(rate("actual_cached_tokens_total"), rate("input_tokens_sum")), "hit rate"),),
            unit="percentunit",
            width=12,
        ),
        Panel(
            title="Reused tokens by worker",
            description="kvrouter_actual_cached_tokens_total. A worker without any: its cache is off or new, or "
            "the fleet does not know what it holds; its trust is on the dashboard Routing decisions.",
            queries=(Query(rate("actual_cached_tokens_total", WORKER, by="worker"), "{{worker}}"),),
            kind="stacked",
            unit="cps",
            width=12,
        ),
    ),
)

OBJECTIVES = Row(
    "Are objectives kept?",
    (
        Panel(
            title=f"Error budget: {ANSWERED_OBJECTIVE:.1%} of requests do not fail",
            description="kvrouter_requests_total: how many times faster than allowed the budget burns. 1: it lasts "
            "just as long as it must. Above 14 for 5 minutes and an hour: an operator must look now; above 1 "
            "for hours: this week.",
            queries=tuple(_answers_burn(over) for over in _WINDOWS),
            bad_from=1,
        ),
        Panel(
            title=f"Latency budget: {FIRST_TOKEN_OBJECTIVE:.0%} of first tokens within {FIRST_TOKEN_S} s",
            description="kvrouter_time_to_first_token_seconds: likewise, of answers whose first token came later. It "
            "is known of streams, and of agents' whole answers. Burning while the error budget does not: the fleet is "
            "too small for its traffic, or routing is wrong.",
            queries=_burns(FIRST_TOKENS),
            bad_from=1,
        ),
        Panel(
            title=f"Latency budget: {TOKEN_INTERVAL_OBJECTIVE:.0%} have {TOKEN_INTERVAL_S} s between tokens or less",
            description="kvrouter_inter_token_latency_seconds: likewise, of answers whose mean time between tokens is "
            "longer. Burning alone: engines' batches are too large, or long prefills stand between decodes.",
            queries=_burns(TOKEN_INTERVALS),
            bad_from=1,
        ),
    ),
)


FLEET = Board(
    uid="kv-router-fleet",
    title="KV router: fleet",
    description="Is it serving, how long do clients wait, what do caches save, are objectives kept.",
    rows=(SERVING, OBJECTIVES, WAITING, QUEUE, FAILURES, CACHES, REPLICAS),
)
