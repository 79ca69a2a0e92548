"""Rows of the dashboard "Worker agents": the engine's KV events, from the engine to the log."""

from dashboards.panels import Panel, Query, Row
from dashboards.promql import WORKER, rate, selected

_RANK = "worker, dp_rank"
_AT = "{{worker}}/{{dp_rank}}"

EVENTS = Row(
    "Are all KV events of the engine heard?",
    (
        Panel(
            title="KV events by kind",
            description="kvrouter_engine_events_total of polled engines. None while requests are answered: the "
            "engine's event settings. refused, unreadable: the rank is stale; the panel after the next says why.",
            queries=(Query(rate("engine_events_total", WORKER, by="kind"), "{{kind}}"),),
            unit="cps",
        ),
        Panel(
            title="Events that were lost",
            description="kvrouter_engine_events_lost_total, kvrouter_event_id_gaps_total (jumps of ids), "
            "kvrouter_event_ids_back_total (the engine restarted). Any: the rank was cleared; raise "
            "engine.event_buffer_max_size.",
            queries=(
                Query(rate("engine_events_lost_total", WORKER, by="worker"), "{{worker}} lost"),
                Query(rate("event_id_gaps_total", WORKER, by="worker"), "{{worker}} jumps"),
                Query(rate("event_ids_back_total", WORKER, by="worker"), "{{worker}} jumps back"),
            ),
            unit="cps",
        ),
        Panel(
            title="Events that could not be read",
            description="kvrouter_quarantined_events_total by reason. docs/RUNBOOKS.md has a table of the reasons; "
            "the agent's /status shows the newest 16.",
            queries=(Query(rate("quarantined_events_total", WORKER, by="worker, reason"), "{{worker}} {{reason}}"),),
            unit="cps",
        ),
        Panel(
            title="Polls",
            description="kvrouter_engine_polls_total, kvrouter_pressed_turns_total, "
            "kvrouter_engine_poll_failures_total by source; at the right kvrouter_engine_event_buffer_ratio, the "
            "largest poll as a share of the buffer. Near 1: raise engine.event_buffer_max_size.",
            queries=(
                Query(rate("engine_polls_total", WORKER, by="source"), "{{source}} polls"),
                Query(rate("pressed_turns_total", WORKER, by="source"), "{{source}} pressed"),
                Query(rate("engine_poll_failures_total", WORKER, by="source"), "{{source}} failed"),
                Query(
                    f"max by (worker) ({selected('engine_event_buffer_ratio', WORKER)})",
                    "{{worker}} of its buffer",
                    right=True,
                ),
            ),
            unit="cps",
        ),
        Panel(
            title="Publishers that engines have",
            description="Of engines that publish: kvrouter_zmq_gaps_total, kvrouter_zmq_replays_total, "
            "kvrouter_zmq_lost_total, kvrouter_zmq_restarts_total. lost: give the publisher a replay_endpoint, or "
            "raise its ring.",
            queries=tuple(
                Query(rate(f"zmq_{name}_total", WORKER, by="worker"), f"{{{{worker}}}} {name}")
                for name in ("gaps", "replays", "lost", "restarts")
            ),
            unit="cps",
        ),
        Panel(
            title="What publishers sent that was refused, and threads that failed",
            description="kvrouter_refused_messages_total, kvrouter_refused_batches_total, "
            "kvrouter_foreign_rank_batches_total, kvrouter_poll_thread_failures_total. A thread that failed is a "
            "defect: thread_failed in the log has the traceback.",
            queries=(
                Query(rate("refused_messages_total", WORKER, by="worker"), "{{worker}} messages"),
                Query(rate("refused_batches_total", WORKER, by="worker"), "{{worker}} batches"),
                Query(rate("foreign_rank_batches_total", WORKER, by="worker"), "{{worker}} of other ranks"),
                Query(rate("poll_thread_failures_total", WORKER, by="worker, thread"), "{{worker}} thread {{thread}}"),
            ),
            unit="cps",
        ),
    ),
)

UNPUBLISHED = Row(
    "What of the engine's events is not published?",
    (
        Panel(
            title="Blocks that are not published",
            description="kvrouter_partial_blocks_dropped_total (as they should be), kvrouter_oversize_dropped_total, "
            "kvrouter_under_withheld_dropped_total, kvrouter_nameless_blocks_dropped_total, "
            "kvrouter_withheld_forgotten_total. oversize, or many under others: engine.block_size is not the engine's.",
            queries=tuple(
                Query(rate(f"{name}_total", WORKER), name.replace("_", " "))
                for name in (
                    "partial_blocks_dropped",
                    "oversize_dropped",
                    "under_withheld_dropped",
                    "nameless_blocks_dropped",
                    "withheld_forgotten",
                )
            ),
            unit="cps",
        ),
        Panel(
            title="Windows of attention",
            description="kvrouter_window_changes_total (the rank was cleared), kvrouter_windows_assumed_total (it was "
            "guessed). Any: set events.attention_window.",
            queries=(
                Query(rate("window_changes_total", WORKER), "changed"),
                Query(rate("windows_assumed_total", WORKER), "assumed"),
            ),
            unit="cps",
        ),
        Panel(
            title="Moves, priorities, names",
            description="kvrouter_tier_moves_total (GPU and host), kvrouter_priority_changes_total, "
            "kvrouter_named_items_total (media with their caller's name). Many moves: the GPU's cache is small for its "
            "traffic.",
            queries=(
                Query(rate("tier_moves_total", WORKER), "moves"),
                Query(rate("priority_changes_total", WORKER), "priorities"),
                Query(rate("named_items_total", WORKER), "named items"),
            ),
            unit="cps",
        ),
    ),
)

STREAM = Row(
    "Do events reach the log?",
    (
        Panel(
            title="Batches that the log does not have yet",
            description="kvrouter_stream_seq minus kvrouter_stream_published_seq by rank; at the right "
            "kvrouter_outbox_bytes. Growing: NATS is away, slow or full; publish_failed in the log says which.",
            queries=(
                Query(
                    f"max by ({_RANK}) ({selected('stream_seq', WORKER)} - {selected('stream_published_seq', WORKER)})",
                    _AT,
                ),
                Query(f"max by ({_RANK}) ({selected('outbox_bytes', WORKER)})", f"{_AT} bytes", right=True),
            ),
        ),
        Panel(
            title="Batches that the log will not have",
            description="kvrouter_outbox_dropped_total (no room), kvrouter_publish_failures_total (not confirmed). "
            "Dropped: indexes ask for a dump; look at NATS.",
            queries=(
                Query(rate("outbox_dropped_total", WORKER, by="worker"), "{{worker}} dropped"),
                Query(rate("publish_failures_total", WORKER, by="worker"), "{{worker}} not confirmed"),
            ),
            unit="cps",
        ),
        Panel(
            title="Blocks in mirrors",
            description="kvrouter_mirror_blocks by rank: what the agent says that the engine holds; at the right "
            "kvrouter_batch_ring_bytes. Far from the index's blocks of the same rank: run indexer verify.",
            queries=(
                Query(f"max by ({_RANK}) ({selected('mirror_blocks', WORKER)})", _AT),
                Query(f"max by ({_RANK}) ({selected('batch_ring_bytes', WORKER)})", f"{_AT} ring bytes", right=True),
            ),
        ),
        Panel(
            title="Changes of mirrors",
            description="kvrouter_mirror_blocks_changed_total by kind. unknown_parent, unknown_removal, unfit or "
            "ambiguous: events are missing, or of another block size; docs/RUNBOOKS.md says what each means.",
            queries=(Query(rate("mirror_blocks_changed_total", WORKER, by="kind"), "{{kind}}"),),
            unit="cps",
        ),
        Panel(
            title="Events before mirrors",
            description="kvrouter_hop_a_events_total by kind: what became of publishers' events. refused: the rank is "
            "stale, and its reason names the field.",
            queries=(Query(rate("hop_a_events_total", WORKER, by="kind"), "{{kind}}"),),
            unit="cps",
        ),
        Panel(
            title="Answers to indexes that recover",
            description="kvrouter_recoveries_answered_total by kind; at the right kvrouter_recovery_bytes_total. "
            "kvrouter_refused_recover_requests_total, kvrouter_dropped_recover_requests_total: unreadable, repeated, "
            "or too many. Many dumps without restarts: raise events.batch_ring_bytes_max.",
            queries=(
                Query(rate("recoveries_answered_total", WORKER, by="kind"), "{{kind}}"),
                Query(rate("refused_recover_requests_total", WORKER), "refused"),
                Query(rate("dropped_recover_requests_total", WORKER), "dropped"),
                Query(rate("recovery_bytes_total", WORKER, by="kind"), "{{kind}} bytes", right=True),
            ),
            unit="cps",
        ),
    ),
)
