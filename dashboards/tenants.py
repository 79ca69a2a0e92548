"""The dashboard "Tenants and cost": what reused prompts saved, by tenant, prefix family, model and adapter."""

from dashboards.panels import Board, Query, panel, row
from dashboards.promql import increase, rate, share

_PROMPT, _REUSED, _BASELINE = (
    "savings_prompt_tokens_total",
    "savings_reused_tokens_total",
    "savings_baseline_tokens_total",
)
_SECONDS, _BASELINE_S = "savings_prefill_seconds_total", "savings_baseline_prefill_seconds_total"
_ALL, _TENANT, _PREFIX = 'by="all"', 'by="tenant"', 'by="prefix"'
_NAMELESS = "A name that is empty: requests that are not told apart (queue.fair_share_by is none)."


def _by_name(counter: str, dimension: str) -> str:
    return rate(counter, dimension, by="name")


SAVED = row(
    "What did the reuse of prompts save, and what of it is due to routing?",
    panel(
        "Prompt tokens computed and reused",
        "kvrouter_savings_prompt_tokens_total, kvrouter_savings_reused_tokens_total, "
        "kvrouter_savings_baseline_tokens_total: computed; reused at any rank (a candidate drawn evenly); reused "
        "because of routing. Little due to routing: every rank has the same prefixes, or none has any.",
        Query(f"{rate(_PROMPT, _ALL)} - {rate(_REUSED, _ALL)}", "computed"),
        Query(rate(_BASELINE, _ALL), "reused anyway"),
        Query(f"{rate(_REUSED, _ALL)} - {rate(_BASELINE, _ALL)}", "reused by routing"),
        kind="stacked",
        unit="cps",
    ),
)

TENANTS = row(
    "Which tenants cost, and which save?",
    panel(
        "Prompt tokens computed, by tenant",
        "kvrouter_savings_prompt_tokens_total minus kvrouter_savings_reused_tokens_total: what the "
        f"tenant's prompts cost. {_NAMELESS} The 20 most requested tenants have a series.",
        Query(f"{_by_name(_PROMPT, _TENANT)} - {_by_name(_REUSED, _TENANT)}", "{{name}}"),
        kind="stacked",
        unit="cps",
    ),
    panel(
        "Hit rate, by tenant",
        "kvrouter_savings_reused_tokens_total of kvrouter_savings_prompt_tokens_total. Low for one "
        "tenant: its prompts begin differently each time (a date, a name at the top), or it comes too rarely.",
        Query(share(_by_name(_REUSED, _TENANT), _by_name(_PROMPT, _TENANT)), "{{name}}"),
        unit="percentunit",
    ),
    panel(
        "Prefill seconds saved by routing, by tenant",
        "kvrouter_savings_prefill_seconds_total minus kvrouter_savings_baseline_prefill_seconds_total, "
        "a second. Below 0: its requests go where less of their prompts is held than elsewhere, because of load.",
        Query(f"{_by_name(_SECONDS, _TENANT)} - {_by_name(_BASELINE_S, _TENANT)}", "{{name}}"),
    ),
)

PREFIXES = row(
    "Which prefixes, models and adapters?",
    panel(
        "Hit rate, by prefix family",
        "kvrouter_savings_reused_tokens_total of kvrouter_savings_prompt_tokens_total. A large family "
        "with a low rate: its prefix is evicted between requests, or its prompts differ soon after it.",
        Query(share(_by_name(_REUSED, _PREFIX), _by_name(_PROMPT, _PREFIX)), "{{name}}"),
        unit="percentunit",
    ),
    panel(
        "Requests not counted",
        "kvrouter_savings_not_counted_total by reason: not_answered (after some, another decision "
        "answered the request), unseen (the prompt was not encoded: set tokens.always), dropped (too many requests "
        "without an outcome).",
        Query(increase("savings_not_counted_total", by="reason"), "{{reason}}"),
        unit="none",
    ),
)

TENANTS_AND_COST = Board(
    uid="kv-router-tenants",
    title="KV router: tenants and cost",
    description="What the reuse of prompts saved, what of it is due to routing, and which tenants, prefixes, models "
    "and adapters cost. router report has the same sums for any period, with their definitions (docs/REPORT.md).",
    rows=(SAVED, TENANTS, PREFIXES),
)
