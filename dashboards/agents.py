"""The dashboard "Worker agents": does the engine serve, what does it do, do its events reach the log."""

from dashboards.panels import Board, Query, panel, row
from dashboards.promql import WORKER, rate, selected

_RANK = "worker, dp_rank"
_AT = "{{worker}}/{{dp_rank}}"

SERVES = row(
    "Does the engine serve?",
    panel(
        "Engines down",
        "kvrouter_engine_dead (in the agent's process: 1 once it is dead) and kvrouter_engine_attached "
        "(1 while an attached engine is healthy), by worker. Dead or not attached: the engine's log says why; "
        "start it again.",
        Query(f"max by (worker) ({selected('engine_dead', WORKER)})", "{{worker}} dead"),
        Query(f"min by (worker) ({selected('engine_attached', WORKER)})", "{{worker}} attached"),
        kind="timeline",
        unit="none",
    ),
    panel(
        "Requests at workers, by outcome",
        "kvrouter_agent_requests_total by worker and outcome, kvrouter_forwarded_requests_total of "
        "attached engines. failed at one worker: its log names the request; drain it.",
        Query(rate("agent_requests_total", WORKER, by="worker, outcome"), "{{worker}} {{outcome}}"),
        Query(rate("forwarded_requests_total", WORKER, by="worker, outcome"), "{{worker}} forwarded, {{outcome}}"),
        unit="reqps",
    ),
    panel(
        "Engine failures",
        "kvrouter_engine_failed_requests_total, kvrouter_logits_processor_errors_total by processor, "
        "kvrouter_engine_canaries_total that were not ok. Failed canaries take the worker out of the fleet; "
        "the log's canary_failed says why.",
        Query(rate("engine_failed_requests_total", WORKER, by="worker"), "{{worker}} requests"),
        Query(rate("logits_processor_errors_total", WORKER, by="worker, processor"), "{{worker}} {{processor}}"),
        Query(
            rate("engine_canaries_total", WORKER, 'outcome!="ok"', by="worker, outcome"),
            "{{worker}} canary {{outcome}}",
        ),
        unit="cps",
    ),
)

LOAD = row(
    "What does the engine do?",
    panel(
        "Requests running and waiting, by rank",
        "kvrouter_engine_running_requests, kvrouter_engine_waiting_requests, by rank. Waiting at one "
        'while others rest: its cache draws everything, see "Cache affinity" of Routing decisions.',
        Query(f"max by ({_RANK}) ({selected('engine_running_requests', WORKER)})", f"{_AT} running"),
        Query(f"max by ({_RANK}) ({selected('engine_waiting_requests', WORKER)})", f"{_AT} waiting"),
    ),
    panel(
        "KV cache in use",
        "kvrouter_engine_used_blocks of kvrouter_engine_total_blocks, by rank. Near 1 under load: it "
        "evicts what it could have reused, and preempts; give it more memory, or fewer requests.",
        Query(
            f"max by ({_RANK}) ({selected('engine_used_blocks', WORKER)})"
            f" / max by ({_RANK}) ({selected('engine_total_blocks', WORKER)})",
            _AT,
        ),
        unit="percentunit",
    ),
    panel(
        "Engine statistics not read",
        "kvrouter_engine_stats_skipped_total by problem, kvrouter_engine_stats_poll_failures_total. A "
        "rank without reports for 5 s is routed to by leases alone: does the engine have another version?",
        Query(rate("engine_stats_skipped_total", WORKER, by="worker, problem"), "{{worker}} {{problem}}"),
        Query(rate("engine_stats_poll_failures_total", WORKER, by="worker"), "{{worker}} not polled"),
        unit="cps",
    ),
)

EVENTS = row(
    "Are all KV events of the engine heard?",
    panel(
        "KV events lost",
        "kvrouter_engine_events_lost_total, kvrouter_event_id_gaps_total (jumps of ids), "
        "kvrouter_event_ids_back_total (the engine restarted). Any: the rank was cleared; raise "
        "engine.event_buffer_max_size. kvrouter_zmq_lost_total: give the publisher a replay_endpoint, or raise its "
        "ring.",
        Query(rate("engine_events_lost_total", WORKER, by="worker"), "{{worker}} lost"),
        Query(rate("event_id_gaps_total", WORKER, by="worker"), "{{worker}} jumps"),
        Query(rate("event_ids_back_total", WORKER, by="worker"), "{{worker}} jumps back"),
        Query(rate("zmq_lost_total", WORKER, by="worker"), "{{worker}} lost by its publisher"),
        unit="cps",
    ),
    panel(
        "KV events that could not be read",
        "kvrouter_quarantined_events_total by reason. docs/RUNBOOKS.md has a table of the reasons; "
        "the agent's /status shows the newest 16.",
        Query(rate("quarantined_events_total", WORKER, by="worker, reason"), "{{worker}} {{reason}}"),
        unit="cps",
    ),
)

STREAM = row(
    "Do events reach the log?",
    panel(
        "Events waiting to be published",
        "kvrouter_stream_seq minus kvrouter_stream_published_seq by rank; at the right "
        "kvrouter_outbox_bytes. Growing: NATS is away, slow or full; publish_failed in the log says which.",
        Query(f"max by ({_RANK}) ({selected('stream_seq', WORKER)} - {selected('stream_published_seq', WORKER)})", _AT),
        Query(f"max by ({_RANK}) ({selected('outbox_bytes', WORKER)})", f"{_AT} bytes", right=True),
    ),
    panel(
        "Events dropped or not confirmed",
        "kvrouter_outbox_dropped_total (no room), kvrouter_publish_failures_total (not confirmed). "
        "Dropped: indexes ask for a dump; look at NATS.",
        Query(rate("outbox_dropped_total", WORKER, by="worker"), "{{worker}} dropped"),
        Query(rate("publish_failures_total", WORKER, by="worker"), "{{worker}} not confirmed"),
        unit="cps",
    ),
)

MEDIA = row(
    "Are media loaded and encoded?",
    panel(
        "Media refused",
        "kvrouter_media_refused_total by reason. address_*, path_*: a client tries what it may not; "
        "text_only: the model takes no media, or --modality multimodal is missing.",
        Query(rate("media_refused_total", WORKER, by="reason"), "{{reason}}"),
        unit="cps",
    ),
    panel(
        "Encode requests",
        "kvrouter_encode_requests_total by outcome; at the right kvrouter_encode_inflight_requests. "
        "failed: the worker's log says why; many in flight: add encode workers.",
        Query(rate("encode_requests_total", WORKER, by="outcome"), "{{outcome}}"),
        Query(f"sum by (worker) ({selected('encode_inflight_requests', WORKER)})", "{{worker}}", right=True),
        unit="reqps",
    ),
)

AGENTS = Board(
    uid="kv-router-agents",
    title="KV router: worker agents",
    description="Does the engine serve, and what does it do; are all of its KV events heard; do they "
    "reach the log; how do media go.",
    rows=(SERVES, LOAD, EVENTS, STREAM, MEDIA),
)
