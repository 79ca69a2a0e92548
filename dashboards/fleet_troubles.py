"""Rows of the dashboard "Fleet": what fails, and whether routers agree."""

from dashboards.panels import Panel, Query, Row
from dashboards.promql import WORKER, rate, selected

_NOT_CLOSED = 'state!="closed"'

FAILURES = Row(
    "What fails?",
    (
        Panel(
            title="Workers' failures",
            description="kvrouter_worker_failures_total by worker and phase: connect, first_byte, body. One worker: "
            "drain it, POST /v1/workers/{id}/drain. All in phase connect: the network, or the workers' "
            "addresses.",
            queries=(Query(rate("worker_failures_total", WORKER, by="worker, phase"), "{{worker}} {{phase}}"),),
            unit="reqps",
        ),
        Panel(
            title="Attempts at another worker",
            description="kvrouter_retries_total, by how the attempt before failed: clients only saw a delay. "
            "kvrouter_streams_lost_total: streams that ended with an error.",
            queries=(
                Query(rate("retries_total", by="phase"), "{{phase}}"),
                Query(rate("streams_lost_total", by="reason"), "lost: {{reason}}"),
            ),
            unit="reqps",
        ),
        Panel(
            title="Requests that took another way than they began",
            description="kvrouter_request_turns_total, by cause. migrated: a stream went on where its worker died. "
            "prefill_failed, no_prefill_worker: decode workers compute prompts, too. decode_failed: a prompt is "
            "prefilled again. Clients only saw a delay; a steady rate is a worker that fails.",
            queries=(Query(rate("request_turns_total", by="reason"), "{{reason}}"),),
            unit="reqps",
        ),
        Panel(
            title="Where prompts are computed",
            description="kvrouter_prefill_placements_total, with disaggregation.conditional. short, prefill_busy: at "
            "the decode worker; long, decode_busy: at a prefill worker. All of one kind: thresholds decide nothing.",
            queries=(Query(rate("prefill_placements_total", by="reason"), "{{reason}}"),),
            unit="reqps",
        ),
        Panel(
            title="Breakers that are not closed",
            description="kvrouter_breaker_state, ranks by state. open: the rank is left alone; half_open: one request "
            "tries whether it is over. Open for long: the worker's log says why.",
            queries=(Query(f"sum by (state) ({selected('breaker_state', WORKER, _NOT_CLOSED)})", "{{state}}"),),
            unit="none",
        ),
        Panel(
            title="Workers ask to be left alone",
            description="kvrouter_worker_back_pressure_total: answers 429 or 503 of workers, "
            "kvrouter_breaker_openings_total: breakers that opened. Back-pressure without failures: the "
            "fleet is full, configure the queue's threshold or add workers.",
            queries=(
                Query(rate("worker_back_pressure_total"), "back-pressure"),
                Query(rate("breaker_openings_total"), "openings"),
            ),
            unit="cps",
        ),
        Panel(
            title="Promises that did not end by themselves",
            description="kvrouter_leases_expired_total, kvrouter_leases_corrected_total: they expired, or the "
            "engine knew nothing of them. Any, while no process was killed: a request ended without a "
            "word; report it.",
            queries=(
                Query(rate("leases_expired_total"), "expired"),
                Query(rate("leases_corrected_total"), "corrected"),
            ),
            unit="cps",
        ),
        Panel(
            title="Refused before they were read, and clients that left",
            description="kvrouter_http_refused_total by status: what was no request, too large or too slow; "
            "kvrouter_http_clients_gone_total: clients that left before their answer was whole. Many that "
            "leave: they time out, compare with the time to first token.",
            queries=(
                Query(rate("http_refused_total", by="status"), "{{status}}"),
                Query(rate("http_clients_gone_total"), "left"),
            ),
            unit="reqps",
        ),
        Panel(
            title="Connections",
            description="kvrouter_http_connections: open to clients and to workers, and of these idle; "
            "kvrouter_http_client_connections_total and kvrouter_http_worker_connections_total: opened, "
            "at the right. Workers' opened as often as requests come: something between closes them, they "
            "should be reused. kvrouter_http_connections_max: how many may be open; "
            "kvrouter_http_accept_failures_total, at the right: connections that the system refused to accept, "
            "by error. Any: the limit of open files is too low.",
            queries=(
                Query(f"sum by (side) ({selected('http_connections')})", "{{side}}"),
                Query(f"sum by (side) ({selected('http_connections_max')})", "{{side}}, at most"),
                Query(rate("http_accept_failures_total", by="error"), "not accepted: {{error}}", right=True),
                Query(rate("http_client_connections_total"), "opened by clients", right=True),
                Query(rate("http_worker_connections_total"), "opened to workers", right=True),
            ),
        ),
        Panel(
            title="The router's event loop is late by",
            description="kvrouter_event_loop_lag_seconds, of every process that is scraped. Above 10 ms the process "
            "is short of CPU, and all latencies above are blurred by it.",
            queries=(
                Query(
                    f"max(histogram_quantile(0.99, {rate('event_loop_lag_seconds_bucket', by='le, instance')}))",
                    "p99, the worst process",
                ),
            ),
            unit="s",
            bad_from=0.01,
        ),
        Panel(
            title="Processes of the router that ended",
            description="kvrouter_process_restarts_total, kvrouter_process_silent_calls_total: of router --processes, "
            "by process; kvrouter_process_up, at the right: how many run. Any restart: the log's process_ended says "
            "how the process ended. Silent: it hangs, or has no CPU.",
            queries=(
                Query(rate("process_restarts_total", by="process"), "restarts: {{process}}"),
                Query(rate("process_silent_calls_total", by="process"), "silent: {{process}}"),
                Query(f"sum({selected('process_up')})", "up", right=True),
            ),
            unit="cps",
        ),
        Panel(
            title="Spans of requests",
            description="kvrouter_spans_sent_total: spans that the collector of traces took; "
            "kvrouter_spans_dropped_total by reason. not_sent: it is away, slow or refuses, and the log's "
            "spans_not_sent says why; queue_full: more than it takes, lower tracing.ratio. Requests are not delayed "
            "by it.",
            queries=(
                Query(rate("spans_sent_total"), "sent"),
                Query(rate("spans_dropped_total", by="reason"), "dropped: {{reason}}"),
            ),
            unit="cps",
        ),
        Panel(
            title="Messages that were refused",
            description="kvrouter_feed_refused_messages_total: fleet and load messages that could not be read; "
            "kvrouter_fleet_refused_total: fleet events by the reason of their refusal; "
            "kvrouter_unregistered_messages_total: heartbeats and load reports of what is not registered. "
            "Any: versions or keys differ, or another program writes to our subjects; "
            "the log names subject and reason.",
            queries=(
                Query(rate("feed_refused_messages_total"), "unreadable"),
                Query(rate("fleet_refused_total", by="reason"), "fleet event: {{reason}}"),
                Query(rate("unregistered_messages_total", by="kind"), "not registered: {{kind}}"),
            ),
            unit="cps",
        ),
    ),
)


REPLICAS = Row(
    "Do routers agree on what is promised?",
    (
        Panel(
            title="Skew between routers",
            description="kvrouter_replica_skew_requests, kvrouter_replica_skew_blocks, "
            "kvrouter_replica_skew_queued_tokens: what routers said of their promises last, minus what is "
            "known of them; the worst of all, 0 for a router alone. Away from 0 for seconds: NATS is slow "
            "or away.",
            queries=tuple(
                Query(f"max(abs({selected(f'replica_skew_{of}')})) or vector(0)", name)
                for of, name in (("requests", "requests"), ("blocks", "blocks"), ("queued_tokens", "tokens"))
            ),
        ),
        Panel(
            title="Messages between routers",
            description="kvrouter_replica_messages_total by outcome. unsent: NATS is away; refused: they could not be "
            "read, so versions differ.",
            queries=(Query(rate("replica_messages_total", by="outcome"), "{{outcome}}"),),
            unit="cps",
        ),
        Panel(
            title="Doubts, and whole ledgers exchanged",
            description="kvrouter_replica_doubts_total by cause: a gap, a difference, silence; "
            "kvrouter_replica_dumps_total by role: ledgers asked, taken, given. Some at a start; many for "
            "long: messages are lost, look at NATS.",
            queries=(
                Query(rate("replica_doubts_total", by="cause"), "{{cause}}"),
                Query(rate("replica_dumps_total", by="role"), "{{role}}"),
            ),
            unit="cps",
        ),
    ),
)
