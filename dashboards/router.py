"""The dashboard "Router process": prompts, journal, connections, drains, what runs."""

from dashboards.panels import Board, Panel, Query, Row
from dashboards.promql import rate, selected

PROMPTS = Row(
    "Are prompts encoded in time?",
    (
        Panel(
            title="Prompts waiting for the tokenizer",
            description="kvrouter_prompts_waiting_bytes now; kvrouter_prompts_off_loop_total: prompts that threads "
            "encoded. It grows: more tokens.threads, or a faster tokens.encoder.",
            queries=(
                Query(f"sum({selected('prompts_waiting_bytes')})", "bytes that wait"),
                Query(rate("prompts_off_loop_total"), "prompts of threads, a second", right=True),
            ),
        ),
        Panel(
            title="Prompts that were not tokenized",
            description="kvrouter_prompts_refused_total (503, no room), kvrouter_prompts_cancelled_total (the client "
            "left), kvrouter_encoder_failures_total (the fast encoder failed, hf did it), "
            "kvrouter_prompts_unrendered_total (routed by their text, by the key that is why); "
            "kvrouter_engine_parity_checks_total (differs: engine_parity_lost in the log). Refused: raise "
            "tokens.threads.",
            queries=(
                Query(rate("prompts_refused_total"), "refused"),
                Query(rate("prompts_cancelled_total"), "cancelled"),
                Query(rate("encoder_failures_total"), "the fast encoder failed"),
                Query(rate("prompts_unrendered_total", by="key"), "only the engine knows: {{key}}"),
                Query(rate("engine_parity_checks_total", by="outcome"), "chats tokenized by engines: {{outcome}}"),
            ),
            unit="cps",
        ),
        Panel(
            title="Prompt text tokenized, known and new",
            description="kvrouter_encoder_bytes_total: text encoded for an earlier prompt, or anew. Few known though "
            "conversations grow: tokens.cache_bytes_max is too small, or the template rewrites earlier turns.",
            queries=(Query(rate("encoder_bytes_total", by="part"), "{{part}}"),),
            kind="stacked",
            unit="cps",
        ),
    ),
)

RUNNING = Row(
    "Is anything refused or lost?",
    (
        Panel(
            title="Versions",
            description="kvrouter_build_info: version of each router. Several: an update has not ended or left one out",
            queries=(Query(f"sum by (version) ({selected('build_info')})", "{{version}}"),),
            kind="stat",
            unit="none",
        ),
        Panel(
            title="Journal records and spans lost",
            description="kvrouter_journal_lost_records_total by reason, kvrouter_journal_publish_failures_total. Any: "
            "those decisions cannot be replayed; log_away and buffer_full: NATS is away or slow. "
            "kvrouter_spans_dropped_total by reason: the collector of traces is away, or lower tracing.ratio.",
            queries=(
                Query(rate("journal_lost_records_total", by="reason"), "{{reason}}"),
                Query(rate("journal_publish_failures_total"), "messages not confirmed"),
                Query(rate("spans_dropped_total", by="reason"), "spans: {{reason}}"),
            ),
            unit="cps",
        ),
        Panel(
            title="Connections refused",
            description="kvrouter_server_connections_at_bound_total by outcome, "
            "kvrouter_server_accept_failures_total by error, and of the data plane kvrouter_http_accept_failures_total."
            " refused: all were in use; EMFILE: raise the limit of open files.",
            queries=(
                Query(rate("server_connections_at_bound_total", by="job, outcome"), "{{job}} {{outcome}}"),
                Query(rate("server_accept_failures_total", by="job, error"), "{{job}} {{error}}"),
                Query(rate("http_accept_failures_total", by="error"), "data plane {{error}}"),
            ),
            unit="cps",
        ),
        Panel(
            title="Requests of gateways, by outcome",
            description="kvrouter_picker_requests_total by outcome: placed, answered by the picker itself, refused, or "
            "left. left grows: the gateway's message_timeout is shorter than the queue.",
            queries=(Query(rate("picker_requests_total", by="outcome"), "{{outcome}}"),),
            kind="stacked",
            unit="cps",
        ),
        Panel(
            title="Prefixes handed over",
            description="kvrouter_handover_prefixes_total by outcome. skipped: GET /v1/workers/{id}/drain says why; "
            "failed: worker_failed in the log.",
            queries=(Query(rate("handover_prefixes_total", by="outcome"), "{{outcome}}"),),
            unit="cps",
        ),
    ),
)

ROUTER = Board(
    uid="kv-router-process",
    title="KV router: router process",
    description="Are prompts encoded in time, is the journal whole, are there enough connections, do gateways get "
    "decisions, do drains keep caches, which versions run.",
    rows=(RUNNING, PROMPTS),
)
