"""The dashboard "Routing decisions": prediction accuracy, spills, deciding rules and decision costs."""

from dashboards.belief import PREDICTION, TRUST
from dashboards.links import DECISIONS_PAGE
from dashboards.panels import Board, Panel, Query, Row
from dashboards.promql import buckets, mean, quantile, rate, selected, share
from dashboards.shadows import SHADOWS

GIVEN_UP = Row(
    "What did a decision give up, and for what?",
    (
        Panel(
            title="Regret",
            description="kvrouter_regret_blocks: the longest overlap among the eligible minus the winner's. Most at "
            "0: the longest prefix wins. A band far above: load outweighs caches; the next panel says "
            "which load.",
            queries=(Query(buckets("regret_blocks"), "{{le}}"),),
            kind="heatmap",
            links=(DECISIONS_PAGE,),
        ),
        Panel(
            title="Regret by the term that it was for",
            description="kvrouter_regret_term_blocks_total, of sampled decisions: the term by which the rank with the "
            "longest prefix cost most more than the winner. Its weight is in GET /v1/policy; not_cost: a "
            "session, a draw or a newcomer's share decided.",
            queries=(Query(rate("regret_term_blocks_total", by="term"), "{{term}}"),),
            kind="stacked",
            unit="cps",
        ),
        Panel(
            title="The winner's cost, by term",
            description="kvrouter_cost_term_seconds, the mean of each term of sampled decisions of mode kv: what all "
            "requests wait longer because of one. wait, prefill and lateness count policy.ttft_weight times. Much wait:"
            " the fleet is too small for its prompts; much slowdown: for its answers. Mode kv-blocks has "
            "kvrouter_cost_term_blocks.",
            queries=(Query(mean("cost_term_seconds", by="term"), "{{term}}"),),
            unit="s",
        ),
        Panel(
            title="Margin",
            description="kvrouter_decision_margin_seconds: the runner-up's cost minus the winner's, of mode kv. Near 0 "
            "the choice hardly matters, and small errors of the index decide it. Mode kv-blocks has "
            "kvrouter_decision_margin_blocks.",
            queries=tuple(Query(quantile(q, "decision_margin_seconds"), f"p{q * 100:g}") for q in (0.1, 0.5, 0.9)),
            unit="s",
        ),
        Panel(
            title="Learnt time of each rank's work",
            description="kvrouter_rate_factor: how many times as long as a reference engine (H200, 8B parameters) the "
            "rank needs for prompts (prefill) and for each token (decode). Ranks of one model that differ are machines "
            "that differ, or one of them is ill.",
            queries=(
                Query(f"max by (worker, dp_rank, work) ({selected('rate_factor')})", "{{worker}}/{{dp_rank}} {{work}}"),
            ),
        ),
        Panel(
            title="Learnt length of answers",
            description="kvrouter_expected_output_tokens, by model: mode kv expects so many tokens of each answer.",
            queries=(Query(f"max by (model) ({selected('expected_output_tokens')})", "{{model}}"),),
        ),
        Panel(
            title="Blocks counted on that were on their way",
            description="kvrouter_predicted_on_route_blocks_total. 0 in a burst of siblings: policy.predict_on_route "
            "is off.",
            queries=(Query(rate("predicted_on_route_blocks_total"), "blocks"),),
            unit="cps",
            width=12,
        ),
        Panel(
            title="Mean regret of a decision",
            description="kvrouter_regret_blocks: blocks that are computed again because the longest prefix did not "
            "win. Times block size it is prefill; compare with the time it saves in the queue.",
            queries=(Query(mean("regret_blocks"), "blocks"),),
            width=12,
        ),
    ),
)

AFFINITY = Row(
    "What is the price of affinity?",
    (
        Panel(
            title="Affinity against imbalance",
            description="kvrouter_decisions_total, the share decided by overlap or by a session, and at the right the "
            "busiest worker's kvrouter_ledger_active_requests over the mean, or over 1 where that is less. Both high: "
            "caches concentrate load; lower overlap_credit; in mode kv-blocks also raise history_weight, or lower "
            "spill_tokens.",
            queries=(
                Query(
                    share(rate("decisions_total", 'reason=~"overlap|affinity"'), rate("decisions_total")),
                    "decided by affinity",
                ),
                Query(
                    f"max(sum by (worker) ({selected('ledger_active_requests')}))"
                    f" / clamp_min(avg(sum by (worker) ({selected('ledger_active_requests')})), 1)",
                    "busiest worker over the mean",
                    right=True,
                ),
            ),
            width=12,
        ),
        Panel(
            title="Uncached tokens, the busiest worker over the mean",
            description="kvrouter_ledger_prefill_tokens_queued; 0 while nothing waits. Above 2 for "
            "long while time to first token rises: as in the panel before.",
            queries=(
                Query(
                    f"max(sum by (worker) ({selected('ledger_prefill_tokens_queued')}))"
                    f" / clamp_min(avg(sum by (worker) ({selected('ledger_prefill_tokens_queued')})), 1)",
                    "busiest worker over the mean",
                ),
            ),
            width=12,
        ),
    ),
)

DECIDED = Row(
    "Which policy decides, and why did the winner win?",
    (
        Panel(
            title="Decisions by policy",
            description="kvrouter_decisions_total. Two policies at a time: replicas differ, or PATCH /v1/policy "
            "changed it.",
            queries=(Query(rate("decisions_total", by="policy") + " > 0", "{{policy}}"),),
            kind="stacked",
            unit="cps",
        ),
        Panel(
            title="Decisions by reason",
            description="kvrouter_decisions_total: overlap, load, turn, draw (a tie, or by temperature), pinned, "
            "affinity (a session), newcomer (its share is spent), only (no other rank is eligible), predicted_ttft, "
            "user. Many by only: the others are unfit, GET /v1/workers says why.",
            queries=(Query(rate("decisions_total", by="reason"), "{{reason}}"),),
            kind="stacked",
            unit="cps",
            links=(DECISIONS_PAGE,),
        ),
        Panel(
            title="Not done as configured",
            description="kvrouter_fallback_total by reason. approximate: the winner's events are not heard, so what "
            "was routed to it stands in; not_encoded: the prompt could not be encoded; the others name "
            "what was given up.",
            queries=(Query(rate("fallback_total", by="reason"), "{{reason}}"),),
            unit="cps",
        ),
    ),
)


COST = Row(
    "What does a decision cost?",
    (
        Panel(
            title="Stages, p50",
            description="kvrouter_decision_duration_seconds by stage: parse, tokenize, hash, match (the index), "
            "choose, total. tokenize rises with prompts that were not seen before; match with ranks and "
            "blocks.",
            queries=(Query(quantile(0.5, "decision_duration_seconds", by="stage"), "{{stage}}"),),
            unit="s",
        ),
        Panel(
            title="Stages, p99",
            description="kvrouter_decision_duration_seconds. p99 of everything at once: the process is short of CPU, "
            "see kvrouter_event_loop_lag_seconds on the dashboard Fleet.",
            queries=(Query(quantile(0.99, "decision_duration_seconds", by="stage"), "{{stage}}"),),
            unit="s",
        ),
        Panel(
            title="Decisions a second",
            description="kvrouter_decision_duration_seconds, stage total: retries and POST /v1/route decide too, and "
            "are in it.",
            queries=(Query(rate("decision_duration_seconds_count", 'stage="total"'), "decisions"),),
            unit="cps",
        ),
    ),
)

DECISIONS = Board(
    uid="kv-router-decisions",
    title="KV router: routing decisions",
    description="Is what was predicted true, what was given up for load, which policy decided, what would another have "
    "chosen, and what did it cost.",
    rows=(PREDICTION, GIVEN_UP, AFFINITY, DECIDED, SHADOWS, TRUST, COST),
)
