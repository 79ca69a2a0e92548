"""The dashboard "Routing decisions": right predictions, trust, what was given up for load, shadows, time to decide."""

from dashboards.links import DECISIONS_PAGE
from dashboards.panels import Board, Query, panel, row
from dashboards.promql import WORKER, increase, mean, quantile, rate, selected, share

_PREDICTED, _ACTUAL = "predicted_cached_tokens_total", "actual_cached_tokens_total"
_ERRORS, _ERRORS_COUNT = "prediction_error_tokens_bucket", "prediction_error_tokens_count"
_NOT_EXACT = 'trust!="EXACT"'
_BELOW_0, _UP_TO_0 = 'le="-1.0"', 'le="0.0"'

PREDICTION = row(
    "Are predictions right, and is every rank trusted?",
    panel(
        "Predictions that were right, by worker",
        "kvrouter_prediction_error_tokens: the share whose error is 0, by worker. A few percent off "
        "is events in flight; a fall is a rank that is believed wrongly.",
        Query(
            share(
                f"({rate(_ERRORS, WORKER, _UP_TO_0, by='worker')} - {rate(_ERRORS, WORKER, _BELOW_0, by='worker')})",
                rate(_ERRORS_COUNT, WORKER, by="worker"),
            ),
            "{{worker}}",
        ),
        unit="percentunit",
    ),
    panel(
        "Ranks that are not trusted",
        "kvrouter_rank_trust: 1 while a rank is DEGRADED or FALLBACK. /v1/workers says why, the log since when.",
        Query(
            f"max by (worker, dp_rank, trust) ({selected('rank_trust', WORKER, _NOT_EXACT)}) == 1",
            "{{worker}}/{{dp_rank}} {{trust}}",
        ),
        kind="timeline",
        unit="none",
    ),
    panel(
        "Workers whose configuration differs",
        "kvrouter_worker_parity: fields in which a worker differs from what prompts are hashed with. "
        "Above 0: give router and worker the same model directory and block size.",
        Query(f"sum by (field) (1 - min by (worker, field) ({selected('worker_parity', WORKER)}))", "{{field}}"),
        unit="none",
    ),
    panel(
        "Ranks predicted wrongly",
        "kvrouter_predictions_doubted_total: overpredicted (a rank reuses less than the index says), "
        "underpredicted (it reuses what was not predicted). The log's predictions_doubted names rank and decision.",
        Query(increase("predictions_doubted_total", by="doubt"), "{{doubt}}"),
        unit="none",
    ),
)


def _difference(metric: str, by: str = "shadow") -> str:
    """Return the mean at the shadows' choices minus that at the live ones."""
    shadow, live = (mean(metric, f'choice="{choice}"', by=by) for choice in ("shadow", "live"))
    return f"{shadow} - {live}"


SHADOWS = row(
    "What would another policy have chosen?",
    panel(
        "Shadow policies: share of other choices",
        "kvrouter_shadow_decisions_total by shadow: the share for which the shadow policy chose "
        "another rank than the live one. Near 0: it would change nothing. shadow.policies and "
        "PUT /v1/shadows set them.",
        Query(
            share(
                rate("shadow_decisions_total", 'verdict="differ"', by="shadow"),
                rate("shadow_decisions_total", by="shadow"),
            ),
            "{{shadow}}",
        ),
        unit="percentunit",
    ),
    panel(
        "Shadow policies: predicted time to first token",
        "kvrouter_shadow_predicted_ttft_seconds, the shadow's choice minus the live one, mean of "
        "the requests that both decided. Below 0 the shadow is predicted to be faster. What its own choices would "
        "have cached later is not in it.",
        Query(_difference("shadow_predicted_ttft_seconds"), "{{shadow}}"),
        unit="s",
    ),
    panel(
        "Shadow policies: decisions skipped",
        "kvrouter_shadow_skipped_total by reason: budget (shadow.budget_us is spent), full (too many "
        "wait), unreadable (the live policy does not read what the shadow needs), no_choice (no rank), failed (a "
        "user's mode raised an error, see shadow_failed in the log).",
        Query(rate("shadow_skipped_total", by="shadow, reason"), "{{shadow}} {{reason}}"),
        unit="cps",
    ),
)

GIVEN_UP = row(
    "Why did the winner win, and what was given up?",
    panel(
        "Cached blocks given up, by cause",
        "kvrouter_regret_term_blocks_total, of sampled decisions: the term by which the rank with the "
        "longest prefix cost most more than the winner. Its weight is in GET /v1/policy; not_cost: a "
        "session, a draw or a newcomer's share decided.",
        Query(rate("regret_term_blocks_total", by="term"), "{{term}}"),
        kind="stacked",
        unit="cps",
    ),
    panel(
        "Slowness of each rank",
        "kvrouter_rate_factor: how many times as long as a reference engine (H200, 8B parameters) the "
        "rank needs for prompts (prefill) and for each token (decode). Ranks of one model that differ are machines "
        "that differ, or one of them is ill.",
        Query(f"max by (worker, dp_rank, work) ({selected('rate_factor')})", "{{worker}}/{{dp_rank}} {{work}}"),
    ),
    panel(
        "Cached blocks given up per request",
        "kvrouter_regret_blocks: blocks that are computed again because the longest prefix did not "
        "win. Times block size it is prefill; compare with the time it saves in the queue.",
        Query(mean("regret_blocks"), "blocks"),
    ),
    panel(
        "Cache affinity, and load imbalance",
        "kvrouter_decisions_total, the share decided by overlap or by a session, and at the right the "
        "busiest worker's kvrouter_ledger_active_requests over the mean, or over 1 where that is less. Both high: "
        "caches concentrate load; lower overlap_credit; in mode kv-blocks also raise history_weight, or lower "
        "spill_tokens.",
        Query(
            share(rate("decisions_total", 'reason=~"overlap|affinity"'), rate("decisions_total")), "decided by affinity"
        ),
        Query(
            f"max(sum by (worker) ({selected('ledger_active_requests')}))"
            f" / clamp_min(avg(sum by (worker) ({selected('ledger_active_requests')})), 1)",
            "busiest worker over the mean",
            right=True,
        ),
    ),
    panel(
        "Why the winner won",
        "kvrouter_decisions_total: overlap, load, turn, draw (a tie, or by temperature), pinned, "
        "affinity (a session), newcomer (its share is spent), only (no other rank is eligible), predicted_ttft, "
        "user. Many by only: the others are unfit, GET /v1/workers says why.",
        Query(rate("decisions_total", by="reason"), "{{reason}}"),
        kind="stacked",
        unit="cps",
        links=(DECISIONS_PAGE,),
    ),
    panel(
        "Fallbacks",
        "kvrouter_fallback_total by reason. approximate: the winner's events are not heard, so what "
        "was routed to it stands in; not_encoded: the prompt could not be encoded; the others name "
        "what was given up.",
        Query(rate("fallback_total", by="reason"), "{{reason}}"),
        unit="cps",
    ),
    panel(
        "Time to decide, p99",
        "kvrouter_decision_duration_seconds. p99 of everything at once: the process is short of CPU, "
        "see kvrouter_event_loop_lag_seconds on the dashboard Fleet.",
        Query(quantile(0.99, "decision_duration_seconds", by="stage"), "{{stage}}"),
        unit="s",
    ),
)

DECISIONS = Board(
    uid="kv-router-decisions",
    title="KV router: routing decisions",
    description="Is what was predicted true, what was given up for load, which policy decided, what would another have "
    "chosen, and what did it cost.",
    rows=(PREDICTION, GIVEN_UP, SHADOWS),
)
