"""Rows of the dashboard "Fleet": how long clients wait, and where work does."""

from dashboards.links import DECISIONS_PAGE, REQUEST_TRACES
from dashboards.panels import Panel, Query, Row
from dashboards.promql import MODEL, WORKER, buckets, mean, quantile, rate, selected


def _greatest(metric: str) -> str:
    """Of the routers' answers: each is about the whole fleet."""
    return f"max by (model, role) ({selected(metric, MODEL)})"


_TAIL = 0.99

WAITING = Row(
    "How long do clients wait?",
    (
        Panel(
            title="Time to first token",
            description="kvrouter_time_to_first_token_seconds, from being routed to the first token, where that is "
            "known. A second band above the first: prompts that were not cached, or a worker that is behind; compare "
            "with the hit rate.",
            queries=(Query(buckets("time_to_first_token_seconds"), "{{le}}"),),
            kind="heatmap",
            unit="s",
            width=12,
        ),
        Panel(
            title="Time to first token, quantiles",
            description="kvrouter_time_to_first_token_seconds. p99 alone rises: look for one worker with queued "
            "prefill below; all rise: the fleet is short of prefill. Points are traced requests, and lead to their "
            "traces.",
            queries=tuple(
                Query(quantile(q, "time_to_first_token_seconds"), f"p{q * 100:g}", exemplars=q == _TAIL)
                for q in (0.5, 0.9, _TAIL)
            ),
            unit="s",
            width=12,
            links=(DECISIONS_PAGE, REQUEST_TRACES),
        ),
        Panel(
            title="Time to first token by model, p95",
            description="kvrouter_model_time_to_first_token_seconds. One model alone is late: its workers are too few, "
            "or its prompts longer; all: look at the queue. unknown: answers of models that left meanwhile.",
            queries=(Query(quantile(0.95, "model_time_to_first_token_seconds", MODEL, by="model"), "{{model}}"),),
            unit="s",
            width=12,
            links=(DECISIONS_PAGE, REQUEST_TRACES),
        ),
        Panel(
            title="Time to first token by worker, p95",
            description="kvrouter_worker_time_to_first_token_seconds. One worker alone is late: slower hardware, or "
            "its cache draws too much, see the dashboard Routing decisions.",
            queries=(Query(quantile(0.95, "worker_time_to_first_token_seconds", WORKER, by="worker"), "{{worker}}"),),
            unit="s",
            width=12,
            links=(DECISIONS_PAGE, REQUEST_TRACES),
        ),
        Panel(
            title="Time between tokens",
            description="kvrouter_inter_token_latency_seconds, the mean of each answer of which it is known. It rises "
            "with the batch: too many requests a worker, or long prefills between decodes.",
            queries=tuple(Query(quantile(q, "inter_token_latency_seconds"), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99)),
            unit="s",
        ),
        Panel(
            title="Whole request",
            description="kvrouter_request_duration_seconds, from head to last byte. It goes with the length of "
            "answers; without that, look at the panels before. Points are traced requests.",
            queries=tuple(
                Query(quantile(q, "request_duration_seconds"), f"p{q * 100:g}", exemplars=q == _TAIL)
                for q in (0.5, 0.9, _TAIL)
            ),
            unit="s",
            links=(DECISIONS_PAGE, REQUEST_TRACES),
        ),
        Panel(
            title="Length of prompts and answers",
            description="kvrouter_input_tokens, kvrouter_output_tokens: means. A change here changes every latency; "
            "nothing need be wrong.",
            queries=(Query(mean("input_tokens"), "in"), Query(mean("output_tokens"), "out")),
        ),
    ),
)

QUEUE = Row(
    "Is work waiting, and where?",
    (
        Panel(
            title="Time in the queue",
            description="kvrouter_queue_wait_seconds, of requests that had to wait for a worker to fall below its "
            "threshold. Nothing is drawn while no request waits. Long waits: add workers, or raise the "
            "threshold.",
            queries=(
                Query(rate("queue_wait_seconds_count"), "requests that waited, a second"),
                Query(rate("queue_wait_seconds_sum"), "seconds waited, a second", right=True),
            ),
        ),
        Panel(
            title="Refused for load",
            description="kvrouter_rejected_total. inflight_requests_max: the router's own bound; the others are the "
            "queue's. Clients are told by Retry-After when to come again.",
            queries=(Query(rate("rejected_total", by="reason"), "{{reason}}"),),
            unit="reqps",
        ),
        Panel(
            title="Uncached tokens promised and not yet computed",
            description="kvrouter_ledger_prefill_tokens_queued, by worker. One worker far above the others: its cache "
            'draws everything, see "The price of affinity" of Routing decisions. Not 0 without '
            "requests: a leak, report it.",
            queries=(Query(f"sum by (worker) ({selected('ledger_prefill_tokens_queued', WORKER)})", "{{worker}}"),),
        ),
        Panel(
            title="Requests promised to workers",
            description="kvrouter_ledger_active_requests, by worker; kvrouter_ledger_active_blocks is what they take "
            "of its cache.",
            queries=(
                Query(f"sum by (worker) ({selected('ledger_active_requests', WORKER)})", "{{worker}}"),
                Query(f"sum by (worker) ({selected('ledger_active_blocks', WORKER)})", "{{worker}} blocks", right=True),
            ),
        ),
        Panel(
            title="What engines say they do",
            description="kvrouter_ledger_reported_running, kvrouter_ledger_reported_waiting: the engines' own word, "
            "by worker. Waiting at one worker while others run none: it is chosen for its cache, see "
            "Routing decisions.",
            queries=(
                Query(f"sum by (worker) ({selected('ledger_reported_running', WORKER)})", "{{worker}} running"),
                Query(f"sum by (worker) ({selected('ledger_reported_waiting', WORKER)})", "{{worker}} waiting"),
            ),
        ),
        Panel(
            title="Reported and not promised",
            description="kvrouter_ledger_difference_requests: what engines reported last minus what is promised; it "
            "swings around 0 with requests on their way. kvrouter_ledger_foreign_requests: what of it "
            "stays, so others' requests: send them through a router.",
            queries=(
                Query(f"sum by (worker) ({selected('ledger_difference_requests', WORKER)})", "{{worker}} difference"),
                Query(f"sum by (worker) ({selected('ledger_foreign_requests', WORKER)})", "{{worker}} foreign"),
            ),
        ),
        Panel(
            title="KV blocks in use, by the engines' word",
            description="kvrouter_ledger_reported_used_blocks. At the worker's total for long: it evicts what it "
            "could have reused; add workers, or memory for their caches.",
            queries=(Query(f"sum by (worker) ({selected('ledger_reported_used_blocks', WORKER)})", "{{worker}}"),),
        ),
        Panel(
            title="Workers, and workers advised",
            description="kvrouter_planner_workers, kvrouter_planner_advised_workers, by model and role. Advised above "
            "the workers for long: the autoscaler does not follow, or has reached its limit. Nothing advised: no rate "
            "was measured yet, see unknown in GET /v1/planner.",
            queries=(
                Query(_greatest("planner_workers"), "{{model}} {{role}}"),
                Query(_greatest("planner_advised_workers"), "{{model}} {{role}} advised"),
            ),
        ),
        Panel(
            title="Prompt tokens offered, and what a worker can compute",
            description="kvrouter_planner_offered_prefill_tokens_per_second, "
            "kvrouter_planner_worker_prefill_tokens_per_second. Offered divided by a worker's is how many workers are "
            "busy with prompts: add workers before it comes near to their number.",
            queries=(
                Query(_greatest("planner_offered_prefill_tokens_per_second"), "{{model}} {{role}} offered"),
                Query(_greatest("planner_worker_prefill_tokens_per_second"), "{{model}} {{role}} a worker"),
            ),
        ),
        Panel(
            title="Output tokens offered, and what a worker can answer",
            description="kvrouter_planner_offered_output_tokens_per_second, "
            "kvrouter_planner_worker_output_tokens_per_second, within planner.itl_s. Offered near the worker's times "
            "the workers: answers become slower than planned, add workers.",
            queries=(
                Query(_greatest("planner_offered_output_tokens_per_second"), "{{model}} {{role}} offered"),
                Query(_greatest("planner_worker_output_tokens_per_second"), "{{model}} {{role}} a worker"),
            ),
        ),
    ),
)
