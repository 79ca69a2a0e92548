"""Rows of the dashboard "Routing decisions": is what is believed of caches true, and how far is each rank believed."""

from dashboards.panels import Panel, Query, Row
from dashboards.promql import WORKER, buckets, increase, rate, selected, share

_PREDICTED, _ACTUAL = "predicted_cached_tokens_total", "actual_cached_tokens_total"
_ERRORS, _ERRORS_COUNT = "prediction_error_tokens_bucket", "prediction_error_tokens_count"
_NOT_EXACT = 'trust!="EXACT"'
_BELOW_0, _UP_TO_0 = 'le="-1.0"', 'le="0.0"'

PREDICTION = Row(
    "Is what was predicted what was reused?",
    (
        Panel(
            title="Predicted and actual cached tokens",
            description="kvrouter_predicted_cached_tokens_total, kvrouter_actual_cached_tokens_total: what the index "
            "promised, what workers reused. They should run together; else the next panels show where.",
            queries=(Query(rate(_PREDICTED, WORKER), "predicted"), Query(rate(_ACTUAL, WORKER), "actual")),
            unit="cps",
        ),
        Panel(
            title="Actual of predicted, by worker",
            description="kvrouter_actual_cached_tokens_total of kvrouter_predicted_cached_tokens_total. Below 1 for "
            "one worker: it is believed to hold what it evicted; GET /v1/index says whether its stream is "
            "followed.",
            queries=(
                Query(share(rate(_ACTUAL, WORKER, by="worker"), rate(_PREDICTED, WORKER, by="worker")), "{{worker}}"),
            ),
            unit="percentunit",
        ),
        Panel(
            title="Requests predicted exactly",
            description="kvrouter_prediction_error_tokens: the share whose error is 0, by worker. A few percent off "
            "is events in flight; a fall is a rank that is believed wrongly.",
            queries=(
                Query(
                    share(
                        f"({rate(_ERRORS, WORKER, _UP_TO_0, by='worker')}"
                        f" - {rate(_ERRORS, WORKER, _BELOW_0, by='worker')})",
                        rate(_ERRORS_COUNT, WORKER, by="worker"),
                    ),
                    "{{worker}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            title="Error of predictions",
            description="kvrouter_prediction_error_tokens, predicted minus actual by request. A spread around 0 is "
            "events in flight; a band above 0 is evictions that are not heard of, one below 0 stores that "
            "are not.",
            queries=(Query(buckets("prediction_error_tokens", WORKER), "{{le}}"),),
            kind="heatmap",
            width=12,
        ),
        Panel(
            title="Mean error by worker",
            description="kvrouter_predicted_cached_tokens_total minus kvrouter_actual_cached_tokens_total, per "
            "request that kvrouter_prediction_error_tokens counts. Away from 0 for long: indexer verify "
            "compares the index with the worker.",
            queries=(
                Query(
                    f"({rate(_PREDICTED, WORKER, by='worker')} - {rate(_ACTUAL, WORKER, by='worker')})"
                    f" / {rate(_ERRORS_COUNT, WORKER, by='worker')}",
                    "{{worker}}",
                ),
            ),
            width=12,
        ),
    ),
)

TRUST = Row(
    "Is every rank trusted?",
    (
        Panel(
            title="Ranks by trust",
            description="kvrouter_rank_trust: EXACT, DEGRADED (half credit), FALLBACK (by what was routed to it). Not "
            'EXACT for long: the table "Is every rank trusted?" of docs/RUNBOOKS.md says what to do.',
            queries=(
                Query(
                    f"sum by (trust) (max by (worker, dp_rank, trust) ({selected('rank_trust', WORKER)}))", "{{trust}}"
                ),
            ),
            kind="stacked",
            unit="none",
        ),
        Panel(
            title="Ranks that are not trusted",
            description="kvrouter_rank_trust: 1 while a rank is DEGRADED or FALLBACK. /v1/workers says why, the log "
            "since when.",
            queries=(
                Query(
                    f"max by (worker, dp_rank, trust) ({selected('rank_trust', WORKER, _NOT_EXACT)})",
                    "{{worker}}/{{dp_rank}} {{trust}}",
                ),
            ),
            kind="timeline",
            unit="none",
        ),
        Panel(
            title="What workers registered that differs",
            description="kvrouter_worker_parity: fields in which a worker differs from what prompts are hashed with. "
            "Above 0: give router and worker the same model directory and block size.",
            queries=(
                Query(
                    f"sum by (field) (1 - min by (worker, field) ({selected('worker_parity', WORKER)}))", "{{field}}"
                ),
            ),
            unit="none",
        ),
        Panel(
            title="Blocks of the approximate index",
            description="kvrouter_approximate_blocks: routed blocks that count still, by worker; used where trust is "
            "FALLBACK. At 262,144 a rank the oldest are forgotten.",
            queries=(Query(f"sum by (worker) ({selected('approximate_blocks', WORKER)})", "{{worker}}"),),
            width=8,
        ),
        Panel(
            title="Forgotten by the approximate index",
            description="kvrouter_approximate_forgotten_blocks_total: expired, evicted (no room), left (with their "
            "worker). Many evicted: the worker's own room is small.",
            queries=(Query(rate("approximate_forgotten_blocks_total", by="cause"), "{{cause}}"),),
            unit="cps",
            width=8,
        ),
        Panel(
            title="Ranks found to be predicted wrongly",
            description="kvrouter_predictions_doubted_total: overpredicted (a rank reuses less than the index says), "
            "underpredicted (it reuses what was not predicted). The log's predictions_doubted names rank and decision.",
            queries=(Query(increase("predictions_doubted_total", by="doubt"), "{{doubt}}"),),
            unit="none",
            width=8,
        ),
    ),
)
