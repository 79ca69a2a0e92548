"""All rules that Prometheus loads: the objectives' and those of single faults. docs/RUNBOOKS.md says what to do.

The rules go by the jobs of `configs/prometheus.yml`: kv-router are routers, kv-router-agents are worker agents. A
Prometheus of several clusters has to evaluate them for each.
"""

from dashboards.objectives import OBJECTIVE_GROUPS
from dashboards.promql import increase, selected
from dashboards.rules import Alert, Group

_RANK = "worker, dp_rank"
_ROUTERS, _NOT_EXACT = 'job="kv-router"', 'trust!="EXACT"'
_EVENT_SOURCE, _BLOCK_SIZE = 'field="event_source"', 'field="block_size"'
_WITHOUT_EVENTS = f"min by (worker) ({selected('worker_parity', _EVENT_SOURCE)}) == 0"
"""Workers that never report KV events, as they registered."""
_WRONG_TOKENS = 128
_ANSWERS = "prediction_error_tokens_count"
_TRUE = (f'le="{_WRONG_TOKENS}.0"', f'le="-{_WRONG_TOKENS}.0"')
"""Predictions that are off by no more: those up to the upper bound, without those up to the lower."""
_REFUSED = 'reason=~"inflight_requests_max|tenant_full|queue_full|timeout"'


def _true_predictions(over: str) -> str:
    up_to, below = (increase("prediction_error_tokens_bucket", le, by="worker", over=over) for le in _TRUE)
    return f"({up_to} - {below})"


KNOWLEDGE = Group(
    "kv-router-knowledge",
    (
        Alert(
            name="KvRouterPredictionsWrong",
            expr=f"(1 - {_true_predictions('15m')} / {increase(_ANSWERS, by='worker', over='15m')} > 0.2)"
            f" and {increase(_ANSWERS, by='worker', over='15m')} >= 20",
            lasting="10m",
            summary="Caches of worker {{ $labels.worker }} are predicted wrongly",
            description="{{ $value | humanizePercentage }} of the predictions for worker {{ $labels.worker }} were off "
            f"by more than {_WRONG_TOKENS} tokens in the last 15 minutes.",
        ),
        Alert(
            name="KvRouterRankNotExact",
            expr=f"max by ({_RANK}, trust) ({selected('rank_trust', _NOT_EXACT)}) == 1"
            f" unless on (worker) {_WITHOUT_EVENTS}",
            lasting="10m",
            summary="Rank {{ $labels.worker }}/{{ $labels.dp_rank }} is {{ $labels.trust }}",
            description="What is known of the caches of rank {{ $labels.worker }}/{{ $labels.dp_rank }} has not been "
            "trusted in full for 10 minutes.",
        ),
        Alert(
            name="KvRouterIndexNotFresh",
            expr=f"max by ({_RANK}) ({selected('freshness_seconds')}) > 2"
            f" and {increase('events_applied_total', by=_RANK, over='5m')} > 0",
            lasting="5m",
            summary="Events of rank {{ $labels.worker }}/{{ $labels.dp_rank }} come late",
            description="The newest events of rank {{ $labels.worker }}/{{ $labels.dp_rank }} were "
            "{{ $value | humanizeDuration }} old when they were applied to the index; more than 2 s for 5 minutes.",
        ),
        Alert(
            name="KvRouterDigestMismatch",
            expr=f"{increase('stream_digest_mismatches_total', by=_RANK, over='15m')} > 0",
            summary="The index differed from rank {{ $labels.worker }}/{{ $labels.dp_rank }}",
            description="At the same place of the stream, the digest of the index and that of rank "
            "{{ $labels.worker }}/{{ $labels.dp_rank }} differed within the last 15 minutes. It is repaired by itself.",
        ),
        Alert(
            name="KvRouterResyncsGoOn",
            expr=f"max by ({_RANK}) (increase({selected('stream_resyncs_total')}[30m])) > 3",
            summary="Rank {{ $labels.worker }}/{{ $labels.dp_rank }} is read anew again and again",
            description="All blocks of rank {{ $labels.worker }}/{{ $labels.dp_rank }} were replaced by a dump "
            "{{ $value | humanize }} times in the last 30 minutes.",
        ),
        Alert(
            name="KvRouterEventsSilent",
            expr=f"{increase(_ANSWERS, by='worker', over='10m')} >= 20"
            f" unless on (worker) {increase('events_applied_total', by='worker', over='10m')} > 0"
            f" unless on (worker) {_WITHOUT_EVENTS}",
            lasting="5m",
            summary="Worker {{ $labels.worker }} answers, and reports no KV events",
            description="Worker {{ $labels.worker }} answered {{ $value | humanize }} requests in the last 10 minutes, "
            "and the index heard of no change of its cache.",
        ),
        Alert(
            name="KvRouterBlockSizeDiffers",
            expr=f"min by (worker) ({selected('worker_parity', _BLOCK_SIZE)}) == 0",
            lasting="1m",
            severity="critical",
            summary="Worker {{ $labels.worker }} has another block size than the router",
            description="Nothing that worker {{ $labels.worker }} caches can be found by prefix: requests reach it by "
            "load alone.",
        ),
    ),
)

LOG = Group(
    "kv-router-log",
    (
        Alert(
            name="KvRouterLogAway",
            expr=f"min by (job, instance) ({selected('log_connected')}) == 0",
            lasting="1m",
            severity="critical",
            summary="{{ $labels.instance }} does not reach NATS",
            description="{{ $labels.job }} {{ $labels.instance }} has had no connection to NATS for a minute.",
        ),
        Alert(
            name="KvRouterLogRefuses",
            expr=f"{increase('log_publish_failures_total', by='job, instance', over='5m')} > 0"
            f" and min by (job, instance) (min_over_time({selected('log_connected')}[5m])) == 1",
            lasting="5m",
            summary="NATS does not store what {{ $labels.instance }} publishes",
            description="NATS is connected, and did not confirm {{ $value | humanize }} publications of "
            "{{ $labels.job }} {{ $labels.instance }} in the last 5 minutes. After its disk was full, a nats-server "
            "has to be restarted.",
        ),
        Alert(
            name="KvRouterSnapshotTooOld",
            expr=f"min({selected('snapshot_age_seconds')}) > 900"
            f" and {increase('events_applied_total', over='15m')} > 0",
            lasting="5m",
            summary="The newest snapshot of the index is {{ $value | humanizeDuration }} old",
            description="The log grows, and no index has written a snapshot for {{ $value | humanizeDuration }}; "
            "nats.snapshot_period_s is 5 minutes, unless it is set. Until one is written the log cannot be purged.",
        ),
        Alert(
            name="KvRouterSnapshotsFail",
            expr=f"{increase('snapshot_failures_total', by='instance', over='15m')} > 30",
            summary="{{ $labels.instance }} cannot keep snapshots",
            description="{{ $value | humanize }} of the checks of the last 15 minutes, one every 5 s, failed at "
            "{{ $labels.instance }}.",
        ),
        Alert(
            name="KvRouterJournalLosesRecords",
            expr=f"{increase('journal_lost_records_total', by='instance, reason', over='15m')} > 0",
            summary="The journal of {{ $labels.instance }} lost records ({{ $labels.reason }})",
            description="{{ $value | humanize }} records of the last 15 minutes are not in the journal "
            "({{ $labels.reason }}). Their decisions cannot be replayed; routing is not affected.",
        ),
    ),
)

PROCESSES = Group(
    "kv-router-processes",
    (
        Alert(
            name="KvRouterQueueSaturated",
            expr=f"{increase('rejected_total', _REFUSED, by='instance, reason', over='5m')} > 0",
            lasting="5m",
            severity="critical",
            summary="{{ $labels.instance }} refuses requests for load ({{ $labels.reason }})",
            description="{{ $labels.instance }} refused {{ $value | humanize }} requests in the last 5 minutes "
            "({{ $labels.reason }}), and has refused some for 5 minutes.",
        ),
        Alert(
            name="KvRouterDown",
            expr='up{job="kv-router"} == 0',
            lasting="1m",
            severity="critical",
            summary="Router {{ $labels.instance }} cannot be scraped",
            description="The control plane of router {{ $labels.instance }} has not answered Prometheus for a minute.",
        ),
        Alert(
            name="KvRouterRestarts",
            expr=f"max by (instance) (resets({selected('event_loop_lag_seconds_count', _ROUTERS)}[30m])) >= 3",
            summary="Router {{ $labels.instance }} began anew {{ $value | humanize }} times",
            description="Router {{ $labels.instance }} began anew {{ $value | humanize }} times in the last 30 "
            "minutes. Each time its streams were cut.",
        ),
        Alert(
            name="KvRouterProcessRestarts",
            expr=f"{increase('process_restarts_total', by='instance, process', over='15m')} > 0",
            summary="Process {{ $labels.process }} of router {{ $labels.instance }} ended and was started again",
            description="Process {{ $labels.process }} of router {{ $labels.instance }} ended within the last 15 "
            "minutes. The streams that it served were cut.",
        ),
        Alert(
            name="KvRouterAgentDown",
            expr='up{job="kv-router-agents"} == 0',
            lasting="1m",
            summary="Agent {{ $labels.instance }} cannot be scraped",
            description="The worker agent {{ $labels.instance }} has not answered Prometheus for a minute.",
        ),
        Alert(
            name="KvRouterEngineDown",
            expr=f"{selected('engine_attached')} == 0 or {selected('engine_dead')} == 1",
            lasting="2m",
            summary="The engine of worker {{ $labels.worker }} does not serve",
            description="The agent of worker {{ $labels.worker }} runs; its engine is dead, or has not been healthy "
            "for 2 minutes.",
        ),
    ),
)

GROUPS = (*OBJECTIVE_GROUPS, KNOWLEDGE, LOG, PROCESSES)
"""In the order of the file."""
