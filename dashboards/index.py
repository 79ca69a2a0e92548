"""The dashboard "Index and event log": is the index current, healed, large enough; NATS and snapshots."""

from dashboards.links import EVENT_TRACES
from dashboards.panels import Board, Query, panel, row
from dashboards.promql import WORKER, rate, selected

_RANK = "worker, dp_rank"
_AT = "{{worker}}/{{dp_rank}}"

CURRENT = row(
    "Is the index current?",
    panel(
        "Event lag, by rank",
        "kvrouter_freshness_seconds: from the engine's flush to the index, of each rank's newest "
        "batch. Above 2 s: NATS or the router is overloaded, or clocks differ.",
        Query(f"max by ({_RANK}) ({selected('freshness_seconds', WORKER)})", _AT),
        unit="s",
        bad_from=2,
        links=(EVENT_TRACES,),
    ),
    panel(
        "KV event batches applied, by worker",
        "kvrouter_events_applied_total, by worker. 0 while the worker answers requests: its agent or "
        "its engine's event settings are wrong, look at the dashboard Worker agents.",
        Query(rate("events_applied_total", WORKER, by="worker"), "{{worker}}"),
        unit="cps",
    ),
)

HEALING = row(
    "What was lost, and how was it healed?",
    panel(
        "Gaps in event streams, and repairs",
        "kvrouter_stream_gaps_total; closed by later batches (kvrouter_stream_holes_closed_total), a "
        "replay (kvrouter_stream_replays_total), differing buckets (kvrouter_stream_repairs_total) or a whole "
        "dump (kvrouter_stream_resyncs_total). Dumps that go on: outboxes overflow, or the log is too small.",
        *tuple(
            Query(rate(f"stream_{name}_total", WORKER), name.replace("_", " "))
            for name in ("gaps", "holes_closed", "replays", "repairs", "resyncs")
        ),
        unit="cps",
    ),
    panel(
        "Index errors found, by rank",
        "kvrouter_stream_digest_mismatches_total, by rank: the index differed at the same place. It is "
        "healed at once; any is a defect, run indexer verify and report it.",
        Query(rate("stream_digest_mismatches_total", WORKER, by=_RANK), _AT),
        unit="cps",
    ),
    panel(
        "Event streams restarted, by worker",
        "kvrouter_stream_restarts_total, by worker. Without restarted agents: two processes publish "
        "the streams of one worker; give each an id of its own.",
        Query(rate("stream_restarts_total", WORKER, by="worker"), "{{worker}}"),
        unit="cps",
    ),
)

ROOM = row(
    "Does the index fit?",
    panel(
        "Index memory",
        "kvrouter_index_memory_bytes by part; index.memory_bytes_max bounds the sum. Near it: raise "
        "it, or new blocks are refused.",
        Query(f"max by (part) ({selected('index_memory_bytes')})", "{{part}}"),
        unit="bytes",
        kind="stacked",
    ),
    panel(
        "Blocks refused for lack of memory",
        "kvrouter_index_refused_blocks_total, kvrouter_index_refused_rank_facts_total, "
        "kvrouter_index_parked_lost_blocks_total; at the right kvrouter_index_overfull_ranks and "
        "kvrouter_index_refused_ranks now. Any: raise index.memory_bytes_max.",
        Query(rate("index_refused_blocks_total"), "refused blocks"),
        Query(rate("index_refused_rank_facts_total"), "events of refused ranks"),
        Query(rate("index_parked_lost_blocks_total"), "parked blocks that were dropped"),
        Query(f"max({selected('index_overfull_ranks')})", "overfull ranks", right=True),
        Query(f"max({selected('index_refused_ranks')})", "refused ranks", right=True),
        unit="cps",
    ),
)

LOG = row(
    "Is NATS reached?",
    panel(
        "Connected to NATS",
        "kvrouter_log_connected of every process: 1 while NATS is reached. 0: routing goes on from "
        "memory; log_lost in the log says since when. Bring NATS back.",
        Query(f"min by (job, instance) ({selected('log_connected')})", "{{job}} {{instance}}"),
        kind="timeline",
        unit="none",
    ),
    panel(
        "NATS errors",
        "kvrouter_log_publish_failures_total, kvrouter_log_reconnects_total, "
        "kvrouter_log_dropped_messages_total (65,536 waited), kvrouter_log_read_anew_total (a stream was "
        "replaced), kvrouter_nats_server_restarts_total (of the embedded nats-server; at the right "
        "kvrouter_nats_server_up). Failures while connected: the disk was full, or a stream has no leader.",
        Query(rate("log_publish_failures_total"), "not confirmed"),
        Query(rate("log_reconnects_total"), "reconnected"),
        Query(rate("log_dropped_messages_total"), "dropped"),
        Query(rate("log_read_anew_total"), "read anew"),
        Query(rate("nats_server_restarts_total"), "nats-server restarted"),
        Query(f"min({selected('nats_server_up')})", "nats-server up", right=True),
        unit="cps",
    ),
)

SNAPSHOTS = row(
    "Are snapshots kept?",
    panel(
        "Age of the newest snapshot",
        "kvrouter_snapshot_age_seconds of any index. Older than nats.snapshot_period_s while the log "
        "grows: snapshot_failed in the log says why, mostly nats.snapshots_bytes_max.",
        Query(f"min({selected('snapshot_age_seconds')})", "age"),
        unit="s",
        bad_from=900,
    ),
    panel(
        "Size of event log and snapshot",
        "kvrouter_log_bytes of the stream KV_EVENTS, kvrouter_snapshot_bytes. The log above three "
        "quarters of nats.events_max_bytes for long: no snapshot could be verified.",
        Query(f"max({selected('log_bytes')})", "log"),
        Query(f"max({selected('snapshot_bytes')})", "snapshot"),
        unit="bytes",
    ),
)

INDEX = Board(
    uid="kv-router-index",
    title="KV router: index and event log",
    description="Is the index current; what was lost, and how was it healed; does the index fit; is NATS reached; are "
    "snapshots kept.",
    rows=(CURRENT, HEALING, ROOM, LOG, SNAPSHOTS),
)
