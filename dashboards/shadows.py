"""A row of the dashboard "Routing decisions": what shadow policies would have chosen."""

from dashboards.panels import Panel, Query, Row
from dashboards.promql import mean, rate, selected, share


def _difference(metric: str, by: str = "shadow") -> str:
    """Return the mean at the shadows' choices minus that at the live ones."""
    shadow, live = (mean(metric, f'choice="{choice}"', by=by) for choice in ("shadow", "live"))
    return f"{shadow} - {live}"


SHADOWS = Row(
    "What would another policy have chosen?",
    (
        Panel(
            title="Shadows: share of other ranks",
            description="kvrouter_shadow_decisions_total by shadow: the share for which the shadow policy chose "
            "another rank than the live one. Near 0: it would change nothing. shadow.policies and "
            "PUT /v1/shadows set them.",
            queries=(
                Query(
                    share(
                        rate("shadow_decisions_total", 'verdict="differ"', by="shadow"),
                        rate("shadow_decisions_total", by="shadow"),
                    ),
                    "{{shadow}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            title="Shadows: predicted time to first token against the live choice",
            description="kvrouter_shadow_predicted_ttft_seconds, the shadow's choice minus the live one, mean of "
            "the requests that both decided. Below 0 the shadow is predicted to be faster. What its own choices would "
            "have cached later is not in it.",
            queries=(Query(_difference("shadow_predicted_ttft_seconds"), "{{shadow}}"),),
            unit="s",
        ),
        Panel(
            title="Shadows: cached blocks against the live choice",
            description="kvrouter_shadow_cached_blocks, blocks that the shadow's rank holds minus those of the "
            "live rank, mean of the requests that both decided.",
            queries=(Query(_difference("shadow_cached_blocks"), "{{shadow}}"),),
        ),
        Panel(
            title="Shadows: cost of the choice against the live one",
            description="kvrouter_shadow_cost_seconds, mean cost of the shadow's choice minus that of the live one. By "
            "the live policy's cost (live) it is above 0, by the shadow's own (own) below 0: each prefers its own. "
            "Both near 0: the policies hardly differ. The next panel has costs in blocks.",
            queries=(Query(_difference("shadow_cost_seconds", "shadow, cost"), "{{shadow}} by {{cost}} cost"),),
            unit="s",
        ),
        Panel(
            title="Shadows: the same in blocks",
            description="kvrouter_shadow_cost_blocks: as the panel before, by costs in blocks (mode kv-blocks).",
            queries=(Query(_difference("shadow_cost_blocks", "shadow, cost"), "{{shadow}} by {{cost}} cost"),),
        ),
        Panel(
            title="Shadows: decisions skipped",
            description="kvrouter_shadow_skipped_total by reason: budget (shadow.budget_us is spent), full (too many "
            "wait), unreadable (the live policy does not read what the shadow needs), no_choice (no rank), failed (a "
            "user's mode raised an error, see shadow_failed in the log).",
            queries=(Query(rate("shadow_skipped_total", by="shadow, reason"), "{{shadow}} {{reason}}"),),
            unit="cps",
        ),
        Panel(
            title="Shadows: time for each request",
            description="kvrouter_shadow_spent_seconds_total of kvrouter_shadow_requests_total, and "
            "kvrouter_shadow_budget_seconds, which bounds it. It is CPU time of the event loop, after the request was "
            "sent.",
            queries=(
                Query(share(rate("shadow_spent_seconds_total"), rate("shadow_requests_total")), "spent"),
                Query(f"max ({selected('shadow_budget_seconds')})", "budget"),
            ),
            unit="s",
        ),
    ),
)
