"""The dashboard "Pools": what `router pools` sends where, and why."""

from dashboards.panels import Board, Query, panel, row
from dashboards.promql import rate, selected

SHARES = row(
    "Which pool serves, and what chose it?",
    panel(
        "Requests of pools, by outcome",
        "kvrouter_pools_requests_total; at the right kvrouter_pools_inflight_requests. failed: the "
        "state of the pools says at which.",
        Query(rate("pools_requests_total", by="outcome"), "{{outcome}}"),
        Query(f"sum({selected('pools_inflight_requests')})", "in flight", right=True),
        unit="reqps",
    ),
    panel(
        "Requests by pool and rule",
        "kvrouter_pool_selections_total by pool and by what chose it. Another share than intended: "
        "look at the rules of docs/POOLS.md in their order.",
        Query(rate("pool_selections_total", by="pool, by"), "{{pool}} by {{by}}"),
        kind="stacked",
        unit="reqps",
    ),
)

FITNESS = row(
    "Are pools fit, and are their targets met?",
    panel(
        "State of pools",
        "kvrouter_pool_state: fit, strained or down. Strained: its queue or latencies are beyond what "
        "the file allows; down: no router of it answers.",
        Query(f"max by (pool, state) ({selected('pool_state')}) == 1", "{{pool}} {{state}}"),
        kind="timeline",
        unit="none",
    ),
    panel(
        "Targets met",
        "kvrouter_pool_attainment_ratio: share of the last window's answers that met ttft or itl "
        "target. Low while another pool's is high: move traffic, or add workers.",
        Query(f"min by (pool, target) ({selected('pool_attainment_ratio')})", "{{pool}} {{target}}"),
        unit="percentunit",
    ),
    panel(
        "Requests queued, by pool",
        "kvrouter_pool_queued_requests: in routers and engines, where known; at the right "
        "kvrouter_pool_routers_up. A queue that does not empty: add workers to the pool.",
        Query(f"max by (pool) ({selected('pool_queued_requests')})", "{{pool}}"),
        Query(f"min by (pool) ({selected('pool_routers_up')})", "{{pool}} routers up", right=True),
    ),
)

POOLS = Board(
    uid="kv-router-pools",
    title="KV router: pools",
    description="Of router pools: which pool serves, and what chose it; are pools fit, and are their targets met.",
    rows=(SHARES, FITNESS),
)
