"""The dashboard "Pools": what `router pools` sends where, and why."""

from dashboards.panels import Board, Panel, Query, Row
from dashboards.promql import rate, selected

SHARES = Row(
    "Which pool serves, and what chose it?",
    (
        Panel(
            title="Requests by outcome, at the pools' router",
            description="kvrouter_pools_requests_total; at the right kvrouter_pools_inflight_requests. failed: the "
            "attempts below say at which pool.",
            queries=(
                Query(rate("pools_requests_total", by="outcome"), "{{outcome}}"),
                Query(f"sum({selected('pools_inflight_requests')})", "in flight", right=True),
            ),
            unit="reqps",
        ),
        Panel(
            title="Chosen first, by pool",
            description="kvrouter_pool_selections_total by pool and by what chose it. Another share than intended: "
            "look at the rules of docs/POOLS.md in their order.",
            queries=(Query(rate("pool_selections_total", by="pool, by"), "{{pool}} by {{by}}"),),
            kind="stacked",
            unit="reqps",
        ),
        Panel(
            title="Attempts by outcome",
            description="kvrouter_pool_attempts_total by pool and outcome. A pool whose attempts fail: its routers' "
            "own dashboard says which workers.",
            queries=(Query(rate("pool_attempts_total", by="pool, outcome"), "{{pool}} {{outcome}}"),),
            unit="reqps",
        ),
    ),
)

FITNESS = Row(
    "Are pools fit, and are their targets met?",
    (
        Panel(
            title="State of pools",
            description="kvrouter_pool_state: fit, strained or down. Strained: its queue or latencies are beyond what "
            "the file allows; down: no router of it answers.",
            queries=(Query(f"max by (pool, state) ({selected('pool_state')}) == 1", "{{pool}} {{state}}"),),
            kind="timeline",
            unit="none",
        ),
        Panel(
            title="Targets met",
            description="kvrouter_pool_attainment_ratio: share of the last window's answers that met ttft or itl "
            "target. Low while another pool's is high: move traffic, or add workers.",
            queries=(Query(f"min by (pool, target) ({selected('pool_attainment_ratio')})", "{{pool}} {{target}}"),),
            unit="percentunit",
        ),
        Panel(
            title="Waiting in pools",
            description="kvrouter_pool_queued_requests: in routers and engines, where known; at the right "
            "kvrouter_pool_routers_up. A queue that does not empty: add workers to the pool.",
            queries=(
                Query(f"max by (pool) ({selected('pool_queued_requests')})", "{{pool}}"),
                Query(f"min by (pool) ({selected('pool_routers_up')})", "{{pool}} routers up", right=True),
            ),
        ),
        Panel(
            title="Passed over",
            description="kvrouter_pool_passed_over_total by pool and cause: requests that another pool took because "
            "this one was not fit. A steady rate: the cause is the pool's, see its state.",
            queries=(Query(rate("pool_passed_over_total", by="pool, cause"), "{{pool}} {{cause}}"),),
            unit="reqps",
            width=12,
        ),
        Panel(
            title="Looks at routers",
            description="kvrouter_pool_looks_total by pool and outcome. Looks that fail: the address or the token of "
            "the pool's control planes is wrong, or a router is down.",
            queries=(Query(rate("pool_looks_total", by="pool, outcome"), "{{pool}} {{outcome}}"),),
            unit="cps",
            width=12,
        ),
    ),
)

POOLS = Board(
    uid="kv-router-pools",
    title="KV router: pools",
    description="Of router pools: which pool serves, and what chose it; are pools fit, and are their targets met.",
    rows=(SHARES, FITNESS),
)
