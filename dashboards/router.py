"""The dashboard "Router process": prompts, journal, connections, drains, what runs."""

from dashboards.panels import Board, Panel, Query, Row
from dashboards.promql import rate, selected

PROMPTS = Row(
    "Are prompts encoded in time?",
    (
        Panel(
            title="Text that waits to be encoded",
            description="kvrouter_prompts_waiting_bytes now; kvrouter_prompts_off_loop_total: prompts that threads "
            "encoded. It grows: more tokens.threads, or the encoder of the next panel is slow.",
            queries=(
                Query(f"sum({selected('prompts_waiting_bytes')})", "bytes that wait"),
                Query(rate("prompts_off_loop_total"), "prompts of threads, a second", right=True),
            ),
        ),
        Panel(
            title="Encoder",
            description="kvrouter_encoder_info: byte, hf (tokenizers), fast (fastokens) or none, by router. hf though "
            "tokens.encoder is auto: encoder_not_fast in the log says which text differs.",
            queries=(Query(f"max by (encoder) ({selected('encoder_info')})", "{{encoder}}"),),
            kind="stat",
            unit="none",
        ),
        Panel(
            title="Prompts that were not encoded",
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
            title="Text of prompts, known and new",
            description="kvrouter_encoder_bytes_total: text encoded for an earlier prompt, or anew. Few known though "
            "conversations grow: tokens.cache_bytes_max is too small, or the template rewrites earlier turns.",
            queries=(Query(rate("encoder_bytes_total", by="part"), "{{part}}"),),
            kind="stacked",
            unit="cps",
        ),
        Panel(
            title="Encoded segments of chats",
            description="kvrouter_encoder_cache_bytes; at the right kvrouter_encoder_cache_segments. Near "
            "tokens.cache_bytes_max, and little text is known: raise it.",
            queries=(
                Query(f"sum({selected('encoder_cache_bytes')})", "bytes"),
                Query(f"sum({selected('encoder_cache_segments')})", "segments", right=True),
            ),
        ),
        Panel(
            title="Images in prompts",
            description="kvrouter_prompt_images_total: hashed for routing (yes) or not (no). Many no: such prompts "
            "are routed by what stands before the first unseen image; send images as data: URLs.",
            queries=(Query(rate("prompt_images_total", by="seen"), "hashed: {{seen}}"),),
            unit="cps",
        ),
    ),
)

JOURNAL = Row(
    "Is the journal whole?",
    (
        Panel(
            title="Records lost",
            description="kvrouter_journal_lost_records_total by reason, kvrouter_journal_publish_failures_total. Any: "
            "those decisions cannot be replayed; log_away and buffer_full: NATS is away or slow.",
            queries=(
                Query(rate("journal_lost_records_total", by="reason"), "{{reason}}"),
                Query(rate("journal_publish_failures_total"), "messages not confirmed"),
            ),
            unit="cps",
        ),
        Panel(
            title="Records written",
            description="kvrouter_journal_records_total, kvrouter_journal_batches_total; at the right "
            "kvrouter_journal_bytes_total and what waits, kvrouter_journal_unpublished_records. What waits does not "
            "get less: NATS is away or slow.",
            queries=(
                Query(rate("journal_records_total"), "records"),
                Query(rate("journal_batches_total"), "messages"),
                Query(rate("journal_bytes_total"), "bytes", right=True),
                Query(f"sum({selected('journal_unpublished_records')})", "waiting records", right=True),
            ),
            unit="cps",
        ),
        Panel(
            title="Checkpoints",
            description="kvrouter_journal_checkpoint_pause_seconds: how long the last one blocked requests; at the "
            "right kvrouter_journal_checkpoint_bytes and kvrouter_journal_checkpoints_total. A pause above 0.05: "
            "fewer idle sessions (policy.affinity_idle_s).",
            queries=(
                Query(f"max({selected('journal_checkpoint_pause_seconds')})", "pause"),
                Query(f"max({selected('journal_checkpoint_bytes')})", "bytes", right=True),
                Query(f"sum({selected('journal_checkpoints_total')})", "checkpoints", right=True),
            ),
            unit="s",
        ),
    ),
)

CONNECTIONS = Row(
    "Do control planes and agents have enough connections?",
    (
        Panel(
            title="Connections to control planes and agents",
            description="kvrouter_server_connections by state, and the bound, kvrouter_server_connections_max. All in "
            "use: raise the hard limit of open files, or find the clients that keep connections open.",
            queries=(
                Query(f"sum by (job, state) ({selected('server_connections')})", "{{job}} {{state}}"),
                Query(f"min by (job) ({selected('server_connections_max')})", "{{job}} bound of one", right=True),
            ),
            width=12,
        ),
        Panel(
            title="Connections at the bound",
            description="kvrouter_server_connections_at_bound_total by outcome, "
            "kvrouter_server_accept_failures_total by error. refused: all were in use; EMFILE: the process has no "
            "descriptors left.",
            queries=(
                Query(rate("server_connections_at_bound_total", by="job, outcome"), "{{job}} {{outcome}}"),
                Query(rate("server_accept_failures_total", by="job, error"), "{{job}} {{error}}"),
            ),
            unit="cps",
            width=12,
        ),
    ),
)

PICKER = Row(
    "Do gateways get their decisions?",
    (
        Panel(
            title="Requests of gateways",
            description="kvrouter_picker_requests_total by outcome: placed, answered by the picker itself, refused, or "
            "left. left grows: the gateway's message_timeout is shorter than the queue.",
            queries=(Query(rate("picker_requests_total", by="outcome"), "{{outcome}}"),),
            kind="stacked",
            unit="cps",
        ),
        Panel(
            title="Streams of gateways",
            description="kvrouter_picker_streams now, of at most 4,096; at the right "
            "kvrouter_picker_body_bytes, bodies in memory.",
            queries=(
                Query(f"sum({selected('picker_streams')})", "streams"),
                Query(f"sum({selected('picker_body_bytes')})", "bytes", right=True),
            ),
            unit="none",
        ),
        Panel(
            title="Requests that went elsewhere",
            description="kvrouter_picker_served_elsewhere_total: the picked worker gave no answer, another of the list "
            "did; kvrouter_picker_failed_streams_total: defects, picker_stream_failed in the log.",
            queries=(
                Query(rate("picker_served_elsewhere_total"), "served elsewhere"),
                Query(rate("picker_failed_streams_total"), "failed streams"),
            ),
            unit="cps",
        ),
    ),
)

DRAINS = Row(
    "Do drains keep what only the leaving worker holds?",
    (
        Panel(
            title="Prefixes handed over",
            description="kvrouter_handover_prefixes_total by outcome. skipped: GET /v1/workers/{id}/drain says why; "
            "failed: worker_failed in the log.",
            queries=(Query(rate("handover_prefixes_total", by="outcome"), "{{outcome}}"),),
            unit="cps",
        ),
        Panel(
            title="The price of hand-overs",
            description="kvrouter_handover_tokens_total: tokens computed elsewhere for it; at the right "
            "kvrouter_handover_seconds_total. Much while clients wait: drain when it is quiet.",
            queries=(
                Query(rate("handover_tokens_total"), "tokens"),
                Query(rate("handover_seconds_total"), "seconds", right=True),
            ),
            unit="cps",
        ),
        Panel(
            title="Memory of recent prompts",
            description="kvrouter_recent_prompts_bytes: prompts that hand-overs choose from. 0 under load: nothing can "
            "be handed over, handover.prompts_bytes_max is 0; it bounds this memory.",
            queries=(Query(f"sum({selected('recent_prompts_bytes')})", "bytes"),),
        ),
    ),
)

WATCHED = Row(
    "What does watching cost?",
    (
        Panel(
            title="Live clients",
            description="kvrouter_live_clients: responses of GET /v1/live; a second, kvrouter_live_dropped_total: they "
            "did not read, kvrouter_live_refused_total: 16 were connected.",
            queries=(
                Query(f"sum({selected('live_clients')})", "connected"),
                Query(rate("live_dropped_total"), "dropped, a second", right=True),
                Query(rate("live_refused_total"), "refused, a second", right=True),
            ),
            unit="none",
            width=12,
        ),
        Panel(
            title="Memory of the fleet's past",
            description="kvrouter_live_history_bytes: kept moments of GET /v1/fleet?at=; beyond 32 MiB the oldest go.",
            queries=(Query(f"sum({selected('live_history_bytes')})", "bytes"),),
            width=12,
        ),
        Panel(
            title="Past moments of the index",
            description="kvrouter_moments: kept, each by a process of its own, at most 2; a second, "
            "kvrouter_moments_failed_total: not restored, or their process ended.",
            queries=(
                Query(f"sum({selected('moments')})", "kept"),
                Query(rate("moments_failed_total"), "failed, a second", right=True),
            ),
            unit="none",
            width=12,
        ),
    ),
)

RUNNING = Row(
    "What runs?",
    (
        Panel(
            title="Versions",
            description="kvrouter_build_info: version of each router. Several: an update has not ended or left one out",
            queries=(Query(f"sum by (version) ({selected('build_info')})", "{{version}}"),),
            kind="stat",
            unit="none",
        ),
    ),
)

ROUTER = Board(
    uid="kv-router-process",
    title="KV router: router process",
    description="Are prompts encoded in time, is the journal whole, are there enough connections, do gateways get "
    "decisions, do drains keep caches, which versions run.",
    rows=(RUNNING, PROMPTS, JOURNAL, CONNECTIONS, PICKER, DRAINS, WATCHED),
)
