"""The dashboard "Worker agents": does the engine serve, what does it do, do its events reach the log."""

from dashboards.agents_events import EVENTS, STREAM, UNPUBLISHED
from dashboards.agents_media import MEDIA
from dashboards.panels import Board, Panel, Query, Row
from dashboards.promql import WORKER, rate, selected

_RANK = "worker, dp_rank"
_AT = "{{worker}}/{{dp_rank}}"

SERVES = Row(
    "Does the engine serve?",
    (
        Panel(
            title="Engines",
            description="kvrouter_engine_dead (in the agent's process: 1 once it is dead) and kvrouter_engine_attached "
            "(1 while an attached engine is healthy), by worker. Dead or not attached: the engine's log says why; "
            "start it again.",
            queries=(
                Query(f"max by (worker) ({selected('engine_dead', WORKER)})", "{{worker}} dead"),
                Query(f"min by (worker) ({selected('engine_attached', WORKER)})", "{{worker}} attached"),
            ),
            kind="timeline",
            unit="none",
        ),
        Panel(
            title="Engines that routers attach",
            description="kvrouter_attached_engines of router --worker, by state. waiting for long: GET /v1/workers of "
            "the router says why; correct the address, or start the engine.",
            queries=(Query(f"sum by (state) ({selected('attached_engines')})", "{{state}}"),),
            unit="none",
        ),
        Panel(
            title="Requests at agents",
            description="kvrouter_agent_requests_total by worker and outcome, kvrouter_forwarded_requests_total of "
            "attached engines. failed at one worker: its log names the request; drain it.",
            queries=(
                Query(rate("agent_requests_total", WORKER, by="worker, outcome"), "{{worker}} {{outcome}}"),
                Query(
                    rate("forwarded_requests_total", WORKER, by="worker, outcome"), "{{worker}} forwarded, {{outcome}}"
                ),
            ),
            unit="reqps",
        ),
        Panel(
            title="In flight at agents",
            description="kvrouter_agent_inflight_requests, kvrouter_forwarded_inflight_requests, by worker. Far above "
            "what its engine can batch: the queue's threshold keeps requests at the router instead.",
            queries=(
                Query(f"sum by (worker) ({selected('agent_inflight_requests', WORKER)})", "{{worker}}"),
                Query(f"sum by (worker) ({selected('forwarded_inflight_requests', WORKER)})", "{{worker}} forwarded"),
            ),
        ),
        Panel(
            title="Failures of engines",
            description="kvrouter_engine_failed_requests_total, kvrouter_logits_processor_errors_total by processor, "
            "kvrouter_engine_canaries_total that were not ok. Failed canaries take the worker out of the fleet; "
            "the log's canary_failed says why.",
            queries=(
                Query(rate("engine_failed_requests_total", WORKER, by="worker"), "{{worker}} requests"),
                Query(
                    rate("logits_processor_errors_total", WORKER, by="worker, processor"), "{{worker}} {{processor}}"
                ),
                Query(
                    rate("engine_canaries_total", WORKER, 'outcome!="ok"', by="worker, outcome"),
                    "{{worker}} canary {{outcome}}",
                ),
            ),
            unit="cps",
        ),
        Panel(
            title="Questions to attached engines",
            description="kvrouter_engine_questions_total by what was asked and outcome. Failures: the engine's address "
            "or version differs from what docs/ATTACH.md allows.",
            queries=(Query(rate("engine_questions_total", WORKER, by="what, outcome"), "{{what}} {{outcome}}"),),
            unit="cps",
        ),
        Panel(
            title="Loading, tool calls, registrations",
            description="kvrouter_engine_load_seconds by worker; at the right kvrouter_agent_tool_calls_total by "
            "ending and kvrouter_registration_repairs_total. unclosed: max_tokens is too small; any repair: another "
            "process uses the worker's id, or forges it.",
            queries=(
                Query(f"max by (worker) ({selected('engine_load_seconds', WORKER)})", "{{worker}} loaded in"),
                Query(rate("agent_tool_calls_total", WORKER, by="ending"), "tool calls, {{ending}}", right=True),
                Query(rate("registration_repairs_total"), "registered again", right=True),
            ),
            unit="s",
        ),
    ),
)

LOAD = Row(
    "What does the engine do?",
    (
        Panel(
            title="Running and waiting in engines",
            description="kvrouter_engine_running_requests, kvrouter_engine_waiting_requests, by rank. Waiting at one "
            "while others rest: its cache draws everything, see the price of affinity.",
            queries=(
                Query(f"max by ({_RANK}) ({selected('engine_running_requests', WORKER)})", f"{_AT} running"),
                Query(f"max by ({_RANK}) ({selected('engine_waiting_requests', WORKER)})", f"{_AT} waiting"),
            ),
        ),
        Panel(
            title="KV cache in use",
            description="kvrouter_engine_used_blocks of kvrouter_engine_total_blocks, by rank. Near 1 under load: it "
            "evicts what it could have reused, and preempts; give it more memory, or fewer requests.",
            queries=(
                Query(
                    f"max by ({_RANK}) ({selected('engine_used_blocks', WORKER)})"
                    f" / max by ({_RANK}) ({selected('engine_total_blocks', WORKER)})",
                    _AT,
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            title="Duration of an iteration",
            description="kvrouter_engine_iteration_seconds of the newest, by rank. It is the time between tokens: it "
            "rises with the batch, and with prefill between decodes.",
            queries=(Query(f"max by ({_RANK}) ({selected('engine_iteration_seconds', WORKER)})", _AT),),
            unit="s",
        ),
        Panel(
            title="Statistics that were not read",
            description="kvrouter_engine_stats_skipped_total by problem, kvrouter_engine_stats_poll_failures_total. A "
            "rank without reports for 5 s is routed to by leases alone: does the engine have another version?",
            queries=(
                Query(rate("engine_stats_skipped_total", WORKER, by="worker, problem"), "{{worker}} {{problem}}"),
                Query(rate("engine_stats_poll_failures_total", WORKER, by="worker"), "{{worker}} not polled"),
            ),
            unit="cps",
        ),
        Panel(
            title="Metrics of attached engines",
            description="kvrouter_engine_metrics_age_seconds; kvrouter_engine_metrics_not_shown by reason, 1 while the "
            "agent does not show the engine's own metrics. stale: the engine does not answer; oversize, unreadable: "
            "scrape the engine itself.",
            queries=(
                Query(f"max by (worker) ({selected('engine_metrics_age_seconds', WORKER)})", "{{worker}} age in s"),
                Query(
                    f"max by (worker, reason) ({selected('engine_metrics_not_shown', WORKER)})",
                    "{{worker}} {{reason}}",
                    right=True,
                ),
            ),
        ),
    ),
)

AGENTS = Board(
    uid="kv-router-agents",
    title="KV router: worker agents",
    description="Does the engine serve, and what does it do; are all of its KV events heard, and what of them is not "
    "published; do they reach the log; how do media go.",
    rows=(SERVES, LOAD, EVENTS, UNPUBLISHED, STREAM, MEDIA),
)
