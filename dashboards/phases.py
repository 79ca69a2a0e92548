"""The dashboard "Prefill, decode and transfers": where prompts are computed, what phases take, how KV gets across."""

from dashboards.links import DECISIONS_PAGE, REQUEST_TRACES
from dashboards.panels import Board, Query, panel, row
from dashboards.promql import WORKER, rate, selected, share

_DONE = 'outcome="done"'

PLACES = row(
    "Where are prompts computed?",
    panel(
        "Where prompts are computed",
        "kvrouter_prefill_placements_total, with disaggregation.conditional. short, prefill_busy: at "
        "the decode worker; long, decode_busy: at a prefill worker. All of one kind: the thresholds decide "
        "nothing.",
        Query(rate("prefill_placements_total", by="reason"), "{{reason}}"),
        kind="stacked",
        unit="reqps",
    ),
    panel(
        "Phases that were repeated",
        "kvrouter_request_turns_total by reason. no_prefill_worker, prefill_failed: a decode worker "
        "computed the prompt, too; decode_failed: the prompt was prefilled again. A steady rate: a worker of that "
        "phase fails, see the dashboard Fleet.",
        Query(rate("request_turns_total", by="reason"), "{{reason}}"),
        unit="reqps",
        links=(DECISIONS_PAGE, REQUEST_TRACES),
    ),
)

PHASES = row(
    "What do the phases take of the engines?",
    panel(
        "Requests by phase",
        "kvrouter_engine_phase_requests of the newest iteration, by phase. All prefill for long: "
        "decodes wait; use prefill and decode workers, or bound the tokens of a batch.",
        Query(f"sum by (phase) ({selected('engine_phase_requests', WORKER)})", "{{phase}}"),
        kind="stacked",
    ),
)

TRANSFERS = row(
    "Does KV get from prefill to decode, and how fast?",
    panel(
        "Prompts waiting for a decode worker",
        "kvrouter_kv_contexts_held, kvrouter_kv_contexts_held_tokens by worker; at the right "
        "kvrouter_kv_contexts_total by outcome, of simulated engines. Rising: no decode worker fetches them; "
        "expired: decode workers fail.",
        Query(f"sum by (worker) ({selected('kv_contexts_held', WORKER)})", "{{worker}}"),
        Query(f"sum by (worker) ({selected('kv_contexts_held_tokens', WORKER)})", "{{worker}} tokens"),
        Query(rate("kv_contexts_total", WORKER, by="outcome"), "{{outcome}}, a second", right=True),
    ),
    panel(
        "KV transfers",
        "kvrouter_kv_transfers_total by outcome; at the right kvrouter_kv_transfers_waiting (of "
        "simulated engines). Waiting for ever: max_tokens_in_buffer is below the longest prompt.",
        Query(rate("kv_transfers_total", WORKER, by="outcome"), "{{outcome}}"),
        Query(f"sum by (worker) ({selected('kv_transfers_waiting', WORKER)})", "{{worker}} waiting", right=True),
        unit="cps",
    ),
    panel(
        "Duration of a KV transfer, mean",
        "kvrouter_kv_transfer_seconds_total by kvrouter_kv_transfers_total of outcome done, by worker; "
        "of simulated engines in simulated time. Longer than computing the prompt again: use "
        "disaggregation.conditional.",
        Query(
            share(
                rate("kv_transfer_seconds_total", WORKER, by="worker"),
                rate("kv_transfers_total", WORKER, _DONE, by="worker"),
            ),
            "{{worker}}",
        ),
        unit="s",
    ),
)

PHASES_BOARD = Board(
    uid="kv-router-phases",
    title="KV router: prefill, decode and transfers",
    description="Where prompts are computed, what prefill and decode take of the engines, and how KV gets from one to "
    "the other.",
    rows=(PLACES, PHASES, TRANSFERS),
)
