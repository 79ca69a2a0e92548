"""The dashboard "Fleet": objectives, latencies, queues and failures."""

from dashboards.links import DECISIONS_PAGE, REQUEST_TRACES
from dashboards.objectives import (
    FIRST_TOKEN_OBJECTIVE,
    FIRST_TOKEN_S,
    FIRST_TOKENS,
    TOKEN_INTERVAL_OBJECTIVE,
    TOKEN_INTERVAL_S,
    TOKEN_INTERVALS,
    Objective,
)
from dashboards.panels import Board, Query, panel, row
from dashboards.promql import MODEL, WORKER, burn, quantile, rate, selected

_WINDOWS = ("5m", "1h", "6h")


def _burns(objective: Objective) -> tuple[Query, ...]:
    allowed = 1 - objective.kept
    return tuple(
        Query(burn(objective.bad(rate, over), rate(objective.total, over=over), allowed), over) for over in _WINDOWS
    )


OBJECTIVES = row(
    "Are objectives kept?",
    panel(
        f"Latency budget: {FIRST_TOKEN_OBJECTIVE:.0%} of first tokens within {FIRST_TOKEN_S} s",
        "kvrouter_time_to_first_token_seconds: how many times faster than allowed late first tokens "
        "use up the budget, of streams and of agents' whole answers. Burning while the error budget does not: "
        "the fleet is too small for its traffic, or routing is wrong.",
        *_burns(FIRST_TOKENS),
        bad_from=1,
    ),
    panel(
        f"Latency budget: {TOKEN_INTERVAL_OBJECTIVE:.0%} have {TOKEN_INTERVAL_S} s between tokens or less",
        "kvrouter_inter_token_latency_seconds: likewise, by the mean time between tokens of an answer. "
        "Burning alone: engines' batches are too large, or long prefills stand between decodes.",
        *_burns(TOKEN_INTERVALS),
        bad_from=1,
    ),
)


def _greatest(metric: str) -> str:
    """Of the routers' answers: each is about the whole fleet."""
    return f"max by (model, role) ({selected(metric, MODEL)})"


WAITING = row(
    "How long do clients wait?",
    panel(
        "Time to first token by model, p95",
        "kvrouter_model_time_to_first_token_seconds. One model alone is late: its workers are too few, "
        "or its prompts longer; all: look at the queue. unknown: answers of models that left meanwhile.",
        Query(quantile(0.95, "model_time_to_first_token_seconds", MODEL, by="model"), "{{model}}"),
        unit="s",
        links=(DECISIONS_PAGE, REQUEST_TRACES),
    ),
    panel(
        "Time to first token by worker, p95",
        "kvrouter_worker_time_to_first_token_seconds. One worker alone is late: slower hardware, or "
        "its cache draws too much, see the dashboard Routing decisions.",
        Query(quantile(0.95, "worker_time_to_first_token_seconds", WORKER, by="worker"), "{{worker}}"),
        unit="s",
        links=(DECISIONS_PAGE, REQUEST_TRACES),
    ),
    panel(
        "Time between tokens",
        "kvrouter_inter_token_latency_seconds, the mean of each answer of which it is known. It rises "
        "with the batch: too many requests a worker, or long prefills between decodes.",
        *tuple(Query(quantile(q, "inter_token_latency_seconds"), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99)),
        unit="s",
    ),
)

QUEUE = row(
    "Is work waiting, and where?",
    panel(
        "Requests queued, and seconds in the queue",
        "kvrouter_queue_wait_seconds, of requests that had to wait for a worker to fall below its "
        "threshold. Nothing is drawn while no request waits. Long waits: add workers, or raise the "
        "threshold.",
        Query(rate("queue_wait_seconds_count"), "requests that waited, a second"),
        Query(rate("queue_wait_seconds_sum"), "seconds waited, a second", right=True),
    ),
    panel(
        "Requests refused for load",
        "kvrouter_rejected_total. inflight_requests_max: the router's own bound; the others are the "
        "queue's. Clients are told by Retry-After when to come again.",
        Query(rate("rejected_total", by="reason"), "{{reason}}"),
        unit="reqps",
    ),
    panel(
        "Prompt tokens waiting, by worker",
        "kvrouter_ledger_prefill_tokens_queued, by worker. One worker far above the others: its cache "
        'draws everything, see "Cache affinity" of Routing decisions. Not 0 without requests: a leak, report it.',
        Query(f"sum by (worker) ({selected('ledger_prefill_tokens_queued', WORKER)})", "{{worker}}"),
    ),
    panel(
        "Requests that bypass the router",
        "kvrouter_ledger_difference_requests: what engines reported last minus what is promised; it "
        "swings around 0 with requests on their way. kvrouter_ledger_foreign_requests: what of it "
        "stays, so others' requests: send them through a router.",
        Query(f"sum by (worker) ({selected('ledger_difference_requests', WORKER)})", "{{worker}} difference"),
        Query(f"sum by (worker) ({selected('ledger_foreign_requests', WORKER)})", "{{worker}} foreign"),
    ),
    panel(
        "Workers, and workers needed",
        "kvrouter_planner_workers, kvrouter_planner_advised_workers, by model and role. Advised above "
        "the workers for long: the autoscaler does not follow, or has reached its limit. Nothing advised: no rate "
        "was measured yet, see unknown in GET /v1/planner.",
        Query(_greatest("planner_workers"), "{{model}} {{role}}"),
        Query(_greatest("planner_advised_workers"), "{{model}} {{role}} advised"),
    ),
)

_NOT_CLOSED = 'state!="closed"'

FAILURES = row(
    "What fails?",
    panel(
        "Routing mode",
        "kvrouter_policy_info: how each router chooses now. Replicas that differ: a PATCH /v1/policy "
        "reached only some of them.",
        Query(f"sum by (mode) ({selected('policy_info')})", "{{mode}}"),
        kind="stat",
        unit="none",
    ),
    panel(
        "Failed attempts, by worker",
        "kvrouter_worker_failures_total by worker and phase: connect, first_byte, body. One worker: "
        "drain it, POST /v1/workers/{id}/drain. All in phase connect: the network, or the workers' "
        "addresses.",
        Query(rate("worker_failures_total", WORKER, by="worker, phase"), "{{worker}} {{phase}}"),
        unit="reqps",
    ),
    panel(
        "Retries, and streams lost",
        "kvrouter_retries_total, by how the attempt before failed: clients only saw a delay. "
        "kvrouter_streams_lost_total: streams that ended with an error.",
        Query(rate("retries_total", by="phase"), "{{phase}}"),
        Query(rate("streams_lost_total", by="reason"), "lost: {{reason}}"),
        unit="reqps",
    ),
    panel(
        "Ranks with an open breaker",
        "kvrouter_breaker_state, ranks by state. open: the rank is left alone; half_open: one request "
        "tries whether it is over. Open for long: the worker's log says why.",
        Query(f"sum by (state) ({selected('breaker_state', WORKER, _NOT_CLOSED)})", "{{state}}"),
        unit="none",
    ),
    panel(
        "Clients that left, and bad requests",
        "kvrouter_http_refused_total by status: what was no request, too large or too slow; "
        "kvrouter_http_clients_gone_total: clients that left before their answer was whole. Many that "
        "leave: they time out, compare with the time to first token.",
        Query(rate("http_refused_total", by="status"), "{{status}}"),
        Query(rate("http_clients_gone_total"), "left"),
        unit="reqps",
    ),
    panel(
        "Event loop lag",
        "kvrouter_event_loop_lag_seconds, of every process that is scraped. Above 10 ms the process "
        "is short of CPU, and all latencies are blurred by it.",
        Query(
            f"max(histogram_quantile(0.99, {rate('event_loop_lag_seconds_bucket', by='le, instance')}))",
            "p99, the worst process",
        ),
        unit="s",
        bad_from=0.01,
    ),
    panel(
        "Restarts of router processes",
        "kvrouter_process_restarts_total, kvrouter_process_silent_calls_total: of router --processes, "
        "by process; kvrouter_process_up, at the right: how many run. Any restart: the log's process_ended says "
        "how the process ended. Silent: it hangs, or has no CPU.",
        Query(rate("process_restarts_total", by="process"), "restarts: {{process}}"),
        Query(rate("process_silent_calls_total", by="process"), "silent: {{process}}"),
        Query(f"sum({selected('process_up')})", "up", right=True),
        unit="cps",
    ),
    panel(
        "Refused fleet messages",
        "kvrouter_feed_refused_messages_total: fleet and load messages that could not be read; "
        "kvrouter_fleet_refused_total: fleet events by the reason of their refusal; "
        "kvrouter_unregistered_messages_total: heartbeats and load reports of what is not registered. "
        "Any: versions or keys differ, or another program writes to our subjects; "
        "the log names subject and reason.",
        Query(rate("feed_refused_messages_total"), "unreadable"),
        Query(rate("fleet_refused_total", by="reason"), "fleet event: {{reason}}"),
        Query(rate("unregistered_messages_total", by="kind"), "not registered: {{kind}}"),
        unit="cps",
    ),
    panel(
        "Differences between routers",
        "kvrouter_replica_skew_requests, kvrouter_replica_skew_blocks, "
        "kvrouter_replica_skew_queued_tokens: what routers said of their promises last, minus what is "
        "known of them; the worst of all, 0 for a router alone. Away from 0 for seconds: NATS is slow "
        "or away.",
        *tuple(
            Query(f"max(abs({selected(f'replica_skew_{of}')})) or vector(0)", name)
            for of, name in (("requests", "requests"), ("blocks", "blocks"), ("queued_tokens", "tokens"))
        ),
    ),
)


FLEET = Board(
    uid="kv-router-fleet",
    title="KV router: fleet",
    description="Are objectives kept, how long do clients wait, where is work waiting, what fails.",
    rows=(OBJECTIVES, WAITING, QUEUE, FAILURES),
)
