"""The dashboard "KV router": eight panels that say whether the fleet is healthy, and whether routing is worth it."""

from dashboards.links import DECISIONS_PAGE, REQUEST_TRACES, to_board
from dashboards.objectives import ANSWERED_OBJECTIVE, FAILED
from dashboards.panels import Board, Panel, Query, Row
from dashboards.promql import MODEL, WORKER, burn, quantile, rate, selected, share

_TAIL = 0.99
_PROMPT, _REUSED, _BASELINE = (f"savings_{of}_tokens_total" for of in ("prompt", "reused", "baseline"))
_SECONDS, _BASELINE_S = "savings_prefill_seconds_total", "savings_baseline_prefill_seconds_total"
_ALL = 'by="all"'
_FLEET, _DECISIONS, _TENANTS = to_board("fleet"), to_board("decisions"), to_board("tenants")


def _burns(over: str) -> Query:
    failed, total = rate("requests_total", MODEL, FAILED, over=over), rate("requests_total", MODEL, over=over)
    return Query(burn(failed, total, 1 - ANSWERED_OBJECTIVE), over)


HEALTHY = Row(
    "Is it healthy?",
    (
        Panel(
            title="Requests by outcome",
            description="kvrouter_requests_total: ok, refused (4xx), failed, cancelled (the client left). failed: the "
            "dashboard Fleet says what fails; refused: the answers name the field.",
            queries=(Query(rate("requests_total", MODEL, by="outcome"), "{{outcome}}"),),
            kind="stacked",
            unit="reqps",
            links=(_FLEET,),
        ),
        Panel(
            title=f"Error budget burn rate: {ANSWERED_OBJECTIVE:.1%} must not fail",
            description="kvrouter_requests_total: how many times faster than allowed the budget burns. Above 14 for 5 "
            "minutes and an hour: look now; above 1 for hours: this week.",
            queries=tuple(_burns(over) for over in ("5m", "1h", "6h")),
            bad_from=1,
            links=(_FLEET,),
        ),
        Panel(
            title="Time to first token",
            description="kvrouter_time_to_first_token_seconds, from routing to the first token. p99 alone rises: one "
            "worker is behind; all rise: add workers. Points are traced requests, and lead to their traces.",
            queries=tuple(
                Query(quantile(q, "time_to_first_token_seconds"), f"p{q * 100:g}", exemplars=q == _TAIL)
                for q in (0.5, 0.9, _TAIL)
            ),
            unit="s",
            links=(DECISIONS_PAGE, REQUEST_TRACES),
        ),
        Panel(
            title="Requests in flight, and queued",
            description="kvrouter_inflight_requests, kvrouter_queued_requests. In flight near "
            "queue.inflight_requests_max: raise it, or add routers. A queue that does not empty: add workers.",
            queries=(
                Query(f"sum({selected('inflight_requests')})", "in flight"),
                Query(f"sum({selected('queued_requests')})", "queued"),
            ),
            links=(_FLEET,),
        ),
        Panel(
            title="Workers that take requests",
            description="kvrouter_rank_fit of kvrouter_workers. Fewer than registered: GET /v1/workers says of each "
            "why (draining, silent, breaker open).",
            queries=(
                Query(f"sum(max by (worker) ({selected('rank_fit')}))", "take requests"),
                Query(f"max({selected('workers')})", "registered"),
            ),
            links=(_FLEET,),
        ),
        Panel(
            title="Ranks by trust in their cache index",
            description="kvrouter_rank_trust: EXACT, DEGRADED (half credit), FALLBACK (by what was routed to it). Not "
            'EXACT for long: the table "Is every rank trusted?" of docs/RUNBOOKS.md says what to do.',
            queries=(
                Query(
                    f"sum by (trust) (max by (worker, dp_rank, trust) ({selected('rank_trust', WORKER)}))", "{{trust}}"
                ),
            ),
            kind="stacked",
            unit="none",
            links=(_DECISIONS,),
        ),
    ),
)

WORTH = Row(
    "Is it worth it?",
    (
        Panel(
            title="Hit rate, with and without routing",
            description="kvrouter_savings_reused_tokens_total and kvrouter_savings_baseline_tokens_total (a worker "
            "drawn evenly) of kvrouter_savings_prompt_tokens_total. Both fall: caches are too small for the prefixes "
            "in use; they meet: every rank holds the same, or load outweighs caches.",
            queries=(
                Query(share(rate(_REUSED, _ALL), rate(_PROMPT, _ALL)), "as routed"),
                Query(share(rate(_BASELINE, _ALL), rate(_PROMPT, _ALL)), "drawn evenly"),
            ),
            unit="percentunit",
            links=(_TENANTS,),
        ),
        Panel(
            title="Prefill seconds saved a second",
            description="kvrouter_savings_prefill_seconds_total, and kvrouter_savings_baseline_prefill_seconds_total: "
            "what a worker drawn evenly would have saved. 1 is a rank that computes prompts all the time: the "
            "difference is how many ranks routing replaces.",
            queries=(Query(rate(_SECONDS, _ALL), "as routed"), Query(rate(_BASELINE_S, _ALL), "drawn evenly")),
            links=(_TENANTS,),
        ),
    ),
)

OVERVIEW = Board(
    uid="kv-router-overview",
    title="KV router",
    description="Is the fleet healthy, and is routing worth it. The other dashboards say why.",
    rows=(HEALTHY, WORTH),
)
