"""The dashboard "Router process": prompts, journal, connections, drains, what runs."""

from dashboards.panels import Board, Query, panel, row
from dashboards.promql import rate, selected

PROMPTS = row(
    "Are prompts encoded in time?",
    panel(
        "Prompts waiting for the tokenizer",
        "kvrouter_prompts_waiting_bytes now; kvrouter_prompts_off_loop_total: prompts that threads "
        "encoded. It grows: more tokens.threads, or a faster tokens.encoder.",
        Query(f"sum({selected('prompts_waiting_bytes')})", "bytes that wait"),
        Query(rate("prompts_off_loop_total"), "prompts of threads, a second", right=True),
    ),
    panel(
        "Prompts that were not tokenized",
        "kvrouter_prompts_refused_total (503, no room), kvrouter_prompts_cancelled_total (the client "
        "left), kvrouter_encoder_failures_total (the fast encoder failed, hf did it), "
        "kvrouter_prompts_unrendered_total (routed by their text, by the key that is why); "
        "kvrouter_engine_parity_checks_total (differs: engine_parity_lost in the log). Refused: raise "
        "tokens.threads.",
        Query(rate("prompts_refused_total"), "refused"),
        Query(rate("prompts_cancelled_total"), "cancelled"),
        Query(rate("encoder_failures_total"), "the fast encoder failed"),
        Query(rate("prompts_unrendered_total", by="key"), "only the engine knows: {{key}}"),
        Query(rate("engine_parity_checks_total", by="outcome"), "chats tokenized by engines: {{outcome}}"),
        unit="cps",
    ),
    panel(
        "Prompt text tokenized, known and new",
        "kvrouter_encoder_bytes_total: text encoded for an earlier prompt, or anew. Few known though "
        "conversations grow: tokens.cache_bytes_max is too small, or the template rewrites earlier turns.",
        Query(rate("encoder_bytes_total", by="part"), "{{part}}"),
        kind="stacked",
        unit="cps",
    ),
)

RUNNING = row(
    "Is anything refused or lost?",
    panel(
        "Versions",
        "kvrouter_build_info: version of each router. Several: an update has not ended or left one out",
        Query(f"sum by (version) ({selected('build_info')})", "{{version}}"),
        kind="stat",
        unit="none",
    ),
    panel(
        "Journal records and spans lost",
        "kvrouter_journal_lost_records_total by reason, kvrouter_journal_publish_failures_total. Any: "
        "those decisions cannot be replayed; log_away and buffer_full: NATS is away or slow. "
        "kvrouter_spans_dropped_total by reason: the collector of traces is away, or lower tracing.ratio.",
        Query(rate("journal_lost_records_total", by="reason"), "{{reason}}"),
        Query(rate("journal_publish_failures_total"), "messages not confirmed"),
        Query(rate("spans_dropped_total", by="reason"), "spans: {{reason}}"),
        unit="cps",
    ),
    panel(
        "Connections refused",
        "kvrouter_server_connections_at_bound_total by outcome, "
        "kvrouter_server_accept_failures_total by error, and of the data plane kvrouter_http_accept_failures_total."
        " refused: all were in use; EMFILE: raise the limit of open files.",
        Query(rate("server_connections_at_bound_total", by="job, outcome"), "{{job}} {{outcome}}"),
        Query(rate("server_accept_failures_total", by="job, error"), "{{job}} {{error}}"),
        Query(rate("http_accept_failures_total", by="error"), "data plane {{error}}"),
        unit="cps",
    ),
    panel(
        "Requests of gateways, by outcome",
        "kvrouter_picker_requests_total by outcome: placed, answered by the picker itself, refused, or "
        "left. left grows: the gateway's message_timeout is shorter than the queue.",
        Query(rate("picker_requests_total", by="outcome"), "{{outcome}}"),
        kind="stacked",
        unit="cps",
    ),
    panel(
        "Prefixes handed over",
        "kvrouter_handover_prefixes_total by outcome. skipped: GET /v1/workers/{id}/drain says why; "
        "failed: worker_failed in the log.",
        Query(rate("handover_prefixes_total", by="outcome"), "{{outcome}}"),
        unit="cps",
    ),
)

ROUTER = Board(
    uid="kv-router-process",
    title="KV router: router process",
    description="Are prompts encoded in time, is the journal whole, are there enough connections, do gateways get "
    "decisions, do drains keep caches, which versions run.",
    rows=(RUNNING, PROMPTS),
)
