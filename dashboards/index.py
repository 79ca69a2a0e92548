"""The dashboard "Index and event log": is the index current, how is it healed, does it fit, are snapshots kept."""

from dashboards.index_log import LOG, SNAPSHOTS
from dashboards.links import EVENT_TRACES
from dashboards.panels import Board, Panel, Query, Row
from dashboards.promql import WORKER, rate, selected

_RANK = "worker, dp_rank"
_AT = "{{worker}}/{{dp_rank}}"

CURRENT = Row(
    "Is the index current?",
    (
        Panel(
            title="Age of events when applied",
            description="kvrouter_freshness_seconds: from the engine's flush to the index, of each rank's newest "
            "batch. Above 2 s: NATS or the router is overloaded, or clocks differ.",
            queries=(Query(f"max by ({_RANK}) ({selected('freshness_seconds', WORKER)})", _AT),),
            unit="s",
            bad_from=2,
            links=(EVENT_TRACES,),
        ),
        Panel(
            title="Ranks that are not known to be current",
            description="kvrouter_stream_stale: 1 while a rank gets half credit. For more than seconds: GET /v1/index "
            "has the reason, docs/RUNBOOKS.md what to do.",
            queries=(Query(f"max by ({_RANK}) ({selected('stream_stale', WORKER)})", _AT),),
            kind="timeline",
            unit="none",
        ),
        Panel(
            title="Batches applied",
            description="kvrouter_events_applied_total, by worker. 0 while the worker answers requests: its agent or "
            "its engine's event settings are wrong, look at the dashboard of agents.",
            queries=(Query(rate("events_applied_total", WORKER, by="worker"), "{{worker}}"),),
            unit="cps",
        ),
    ),
)

HEALING = Row(
    "What was lost, and how was it healed?",
    (
        Panel(
            title="Gaps, and what closed them",
            description="kvrouter_stream_gaps_total; closed by later batches (kvrouter_stream_holes_closed_total), a "
            "replay (kvrouter_stream_replays_total), differing buckets (kvrouter_stream_repairs_total) or a whole "
            "dump (kvrouter_stream_resyncs_total). Dumps that go on: outboxes overflow, or the log is too small.",
            queries=tuple(
                Query(rate(f"stream_{name}_total", WORKER), name.replace("_", " "))
                for name in ("gaps", "holes_closed", "replays", "repairs", "resyncs")
            ),
            unit="cps",
        ),
        Panel(
            title="Duration of recoveries",
            description="kvrouter_stream_last_healing_seconds by rank; at the right kvrouter_stream_heals_total and "
            "kvrouter_stream_healing_seconds_total a second. More than a few seconds: the agent does not answer, or "
            "NATS is slow.",
            queries=(
                Query(f"max by ({_RANK}) ({selected('stream_last_healing_seconds', WORKER)})", _AT),
                Query(rate("stream_heals_total", WORKER), "recoveries a second", right=True),
                Query(rate("stream_healing_seconds_total", WORKER), "seconds of recovery a second", right=True),
            ),
            unit="s",
        ),
        Panel(
            title="Differences from the agent's mirror",
            description="kvrouter_stream_digest_mismatches_total, by rank: the index differed at the same place. It is "
            "healed at once; any is a defect, run indexer verify and report it.",
            queries=(Query(rate("stream_digest_mismatches_total", WORKER, by=_RANK), _AT),),
            unit="cps",
        ),
        Panel(
            title="Batches that changed nothing",
            description="kvrouter_stream_duplicates_total, kvrouter_stream_other_epoch_total, "
            "kvrouter_stream_implausible_total, kvrouter_stream_kept_lost_total (no room during a recovery). Many of "
            "other epochs, or any implausible: two processes publish one worker's stream.",
            queries=tuple(
                Query(rate(f"stream_{name}_total", WORKER), name.replace("_", " "))
                for name in ("duplicates", "other_epoch", "implausible", "kept_lost")
            ),
            unit="cps",
            width=12,
        ),
        Panel(
            title="Streams that began anew",
            description="kvrouter_stream_restarts_total, by worker. Without restarted agents: two processes publish "
            "the streams of one worker; give each an id of its own.",
            queries=(Query(rate("stream_restarts_total", WORKER, by="worker"), "{{worker}}"),),
            unit="cps",
            width=12,
        ),
    ),
)

ROOM = Row(
    "Does the index fit?",
    (
        Panel(
            title="Blocks by worker",
            description="kvrouter_index_blocks: what each worker holds, by medium. A fall to 0: the worker was "
            "cleared, or left; the log says which.",
            queries=(
                Query(
                    f"sum by (worker, medium) (max by ({_RANK}, medium) ({selected('index_blocks', WORKER)}))",
                    "{{worker}} {{medium}}",
                ),
            ),
        ),
        Panel(
            title="Memory of the index",
            description="kvrouter_index_memory_bytes by part; index.memory_bytes_max bounds the sum. Near it: raise "
            "it, or new blocks are refused.",
            queries=(Query(f"max by (part) ({selected('index_memory_bytes')})", "{{part}}"),),
            kind="stacked",
        ),
        Panel(
            title="What the index is made of",
            description="kvrouter_index_nodes (distinct prefixes), kvrouter_index_ranks, kvrouter_index_parked_blocks "
            "(their parent is not known), at the right kvrouter_index_structure by thing. Parked blocks that stay: "
            "a repair of the rank brings what they wait for.",
            queries=(
                Query(f"max({selected('index_nodes')})", "prefixes"),
                Query(f"max({selected('index_ranks')})", "ranks"),
                Query(f"max({selected('index_parked_blocks')})", "parked"),
                Query(f"max by (thing) ({selected('index_structure')})", "{{thing}}", right=True),
            ),
        ),
        Panel(
            title="What had no room",
            description="kvrouter_index_refused_blocks_total, kvrouter_index_refused_rank_facts_total, "
            "kvrouter_index_parked_lost_blocks_total; at the right kvrouter_index_overfull_ranks and "
            "kvrouter_index_refused_ranks now. Any: raise index.memory_bytes_max.",
            queries=(
                Query(rate("index_refused_blocks_total"), "refused blocks"),
                Query(rate("index_refused_rank_facts_total"), "events of refused ranks"),
                Query(rate("index_parked_lost_blocks_total"), "parked blocks that were dropped"),
                Query(f"max({selected('index_overfull_ranks')})", "overfull ranks", right=True),
                Query(f"max({selected('index_refused_ranks')})", "refused ranks", right=True),
            ),
            unit="cps",
        ),
        Panel(
            title="Events that do not fit what is known",
            description="kvrouter_index_duplicate_blocks_total, kvrouter_index_unknown_removals_total, "
            "kvrouter_index_parent_conflicts_total. Conflicts: agents hash differently, look for worker_differs in "
            "the log.",
            queries=(
                Query(rate("index_duplicate_blocks_total"), "stored twice"),
                Query(rate("index_unknown_removals_total"), "removed and not held"),
                Query(rate("index_parent_conflicts_total"), "another parent"),
            ),
            unit="cps",
        ),
        Panel(
            title="Messages that the index refused",
            description="kvrouter_index_refused_messages_total (unreadable) and kvrouter_index_fleet_refused_total by "
            "reason. Any: the log has subject and reason; signature: a key is missing, or an intruder.",
            queries=(
                Query(rate("index_refused_messages_total"), "unreadable"),
                Query(rate("index_fleet_refused_total", by="reason"), "fleet event: {{reason}}"),
            ),
            unit="cps",
        ),
    ),
)

INDEX = Board(
    uid="kv-router-index",
    title="KV router: index and event log",
    description="Is the index current; what was lost, and how was it healed; does the index fit; is NATS reached; are "
    "snapshots kept.",
    rows=(CURRENT, HEALING, ROOM, LOG, SNAPSHOTS),
)
