"""The dashboard "KV router": eight panels that say whether the fleet is healthy, and whether routing is worth it."""

from dashboards.links import DECISIONS_PAGE, REQUEST_TRACES, to_board
from dashboards.objectives import ANSWERED_OBJECTIVE, FAILED
from dashboards.panels import Board, Query, panel, row
from dashboards.promql import MODEL, WORKER, burn, quantile, rate, selected, share

_TAIL = 0.99
_PROMPT, _REUSED, _BASELINE = (f"savings_{of}_tokens_total" for of in ("prompt", "reused", "baseline"))
_SECONDS, _BASELINE_S = "savings_prefill_seconds_total", "savings_baseline_prefill_seconds_total"
_ALL = 'by="all"'
_FLEET, _DECISIONS, _TENANTS = to_board("fleet"), to_board("decisions"), to_board("tenants")


def _burns(over: str) -> Query:
    failed, total = rate("requests_total", MODEL, FAILED, over=over), rate("requests_total", MODEL, over=over)
    return Query(burn(failed, total, 1 - ANSWERED_OBJECTIVE), over)


HEALTHY = row(
    "Is it healthy?",
    panel(
        "Requests by outcome",
        "kvrouter_requests_total: ok, refused (4xx), failed, cancelled (the client left). failed: the "
        "dashboard Fleet says what fails; refused: the answers name the field.",
        Query(rate("requests_total", MODEL, by="outcome"), "{{outcome}}"),
        kind="stacked",
        unit="reqps",
        links=(_FLEET,),
    ),
    panel(
        f"Error budget burn rate: {ANSWERED_OBJECTIVE:.1%} must not fail",
        "kvrouter_requests_total: how many times faster than allowed the budget burns. Above 14 for 5 "
        "minutes and an hour: look now; above 1 for hours: this week.",
        *tuple(_burns(over) for over in ("5m", "1h", "6h")),
        bad_from=1,
        links=(_FLEET,),
    ),
    panel(
        "Time to first token",
        "kvrouter_time_to_first_token_seconds, from routing to the first token. p99 alone rises: one "
        "worker is behind; all rise: add workers. Points are traced requests, and lead to their traces.",
        *tuple(
            Query(quantile(q, "time_to_first_token_seconds"), f"p{q * 100:g}", exemplars=q == _TAIL)
            for q in (0.5, 0.9, _TAIL)
        ),
        unit="s",
        links=(DECISIONS_PAGE, REQUEST_TRACES),
    ),
    panel(
        "Requests in flight, and queued",
        "kvrouter_inflight_requests, kvrouter_queued_requests. In flight near "
        "queue.inflight_requests_max: raise it, or add routers. A queue that does not empty: add workers.",
        Query(f"sum({selected('inflight_requests')})", "in flight"),
        Query(f"sum({selected('queued_requests')})", "queued"),
        links=(_FLEET,),
    ),
    panel(
        "Workers that take requests",
        "kvrouter_rank_fit of kvrouter_workers. Fewer than registered: GET /v1/workers says of each "
        "why (draining, silent, breaker open).",
        Query(f"sum(max by (worker) ({selected('rank_fit')}))", "take requests"),
        Query(f"max({selected('workers')})", "registered"),
        links=(_FLEET,),
    ),
    panel(
        "Ranks by trust in their cache index",
        "kvrouter_rank_trust: EXACT, DEGRADED (half credit), FALLBACK (by what was routed to it). Not "
        'EXACT for long: the table "Is every rank trusted?" of docs/RUNBOOKS.md says what to do.',
        Query(f"sum by (trust) (max by (worker, dp_rank, trust) ({selected('rank_trust', WORKER)}))", "{{trust}}"),
        kind="stacked",
        unit="none",
        links=(_DECISIONS,),
    ),
)

WORTH = row(
    "Is it worth it?",
    panel(
        "Hit rate, with and without routing",
        "kvrouter_savings_reused_tokens_total and kvrouter_savings_baseline_tokens_total (a worker "
        "drawn evenly) of kvrouter_savings_prompt_tokens_total. Both fall: caches are too small for the prefixes "
        "in use; they meet: every rank holds the same, or load outweighs caches.",
        Query(share(rate(_REUSED, _ALL), rate(_PROMPT, _ALL)), "as routed"),
        Query(share(rate(_BASELINE, _ALL), rate(_PROMPT, _ALL)), "drawn evenly"),
        unit="percentunit",
        links=(_TENANTS,),
    ),
    panel(
        "Prefill seconds saved a second",
        "kvrouter_savings_prefill_seconds_total, and kvrouter_savings_baseline_prefill_seconds_total: "
        "what a worker drawn evenly would have saved. 1 is a rank that computes prompts all the time: the "
        "difference is how many ranks routing replaces.",
        Query(rate(_SECONDS, _ALL), "as routed"),
        Query(rate(_BASELINE_S, _ALL), "drawn evenly"),
        links=(_TENANTS,),
    ),
)

OVERVIEW = Board(
    uid="kv-router-overview",
    title="KV router",
    description="Is the fleet healthy, and is routing worth it. The other dashboards say why.",
    rows=(HEALTHY, WORTH),
)
