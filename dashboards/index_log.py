"""Rows of the dashboard "Index and event log": the connection to NATS, the log and its snapshots."""

from dashboards.panels import Panel, Query, Row
from dashboards.promql import rate, selected

LOG = Row(
    "Is NATS reached?",
    (
        Panel(
            title="Connected to NATS",
            description="kvrouter_log_connected of every process: 1 while NATS is reached. 0: routing goes on from "
            "memory; log_lost in the log says since when. Bring NATS back.",
            queries=(Query(f"min by (job, instance) ({selected('log_connected')})", "{{job}} {{instance}}"),),
            kind="timeline",
            unit="none",
        ),
        Panel(
            title="Publications on their way",
            description="kvrouter_log_unconfirmed_messages, by process; 256 at most. At the bound for long: NATS is "
            "slow, look at its disk.",
            queries=(
                Query(f"max by (job, instance) ({selected('log_unconfirmed_messages')})", "{{job}} {{instance}}"),
            ),
        ),
        Panel(
            title="Troubles with NATS",
            description="kvrouter_log_publish_failures_total, kvrouter_log_reconnects_total, "
            "kvrouter_log_dropped_messages_total (65,536 waited), kvrouter_log_read_anew_total (a stream was "
            "replaced), kvrouter_nats_server_restarts_total (of the embedded nats-server; at the right "
            "kvrouter_nats_server_up). Failures while connected: the disk was full, or a stream has no leader.",
            queries=(
                Query(rate("log_publish_failures_total"), "not confirmed"),
                Query(rate("log_reconnects_total"), "reconnected"),
                Query(rate("log_dropped_messages_total"), "dropped"),
                Query(rate("log_read_anew_total"), "read anew"),
                Query(rate("nats_server_restarts_total"), "nats-server restarted"),
                Query(f"min({selected('nats_server_up')})", "nats-server up", right=True),
            ),
            unit="cps",
        ),
    ),
)

SNAPSHOTS = Row(
    "Are snapshots kept?",
    (
        Panel(
            title="Age of the newest snapshot",
            description="kvrouter_snapshot_age_seconds of any index. Older than nats.snapshot_period_s while the log "
            "grows: the panel after the next says whether writing fails.",
            queries=(Query(f"min({selected('snapshot_age_seconds')})", "age"),),
            unit="s",
            bad_from=900,
        ),
        Panel(
            title="Size of log and snapshot",
            description="kvrouter_log_bytes of the stream KV_EVENTS, kvrouter_snapshot_bytes. The log above three "
            "quarters of nats.events_max_bytes for long: no snapshot could be verified.",
            queries=(
                Query(f"max({selected('log_bytes')})", "log"),
                Query(f"max({selected('snapshot_bytes')})", "snapshot"),
            ),
        ),
        Panel(
            title="Snapshots",
            description="kvrouter_snapshots_written_total, kvrouter_snapshot_failures_total (checks, every 5 s), "
            "kvrouter_snapshots_refused_total (at a start). Failures: snapshot_failed in the log says why, mostly "
            "nats.snapshots_bytes_max.",
            queries=(
                Query(rate("snapshots_written_total"), "written"),
                Query(rate("snapshot_failures_total"), "failed checks"),
                Query(rate("snapshots_refused_total"), "refused"),
            ),
            unit="cps",
        ),
        Panel(
            title="Places in the log",
            description="kvrouter_snapshot_seq: what the newest snapshot covers; kvrouter_log_purged_seq: up to where "
            "the log was purged. A snapshot that stands still while the log grows: as in the panel before.",
            queries=(
                Query(f"max({selected('snapshot_seq')})", "snapshot"),
                Query(f"max({selected('log_purged_seq')})", "purged"),
            ),
            width=12,
        ),
        Panel(
            title="Reading the log after a start",
            description="kvrouter_index_catching_up: 1 until the index has read what the log held; /ready is 503 "
            "meanwhile. It stays 1: the log grows faster than it is read, and snapshots are missing.",
            queries=(Query(f"max by (job, instance) ({selected('index_catching_up')})", "{{job}} {{instance}}"),),
            kind="timeline",
            unit="none",
            width=12,
        ),
    ),
)
