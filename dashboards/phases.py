"""The dashboard "Prefill, decode and transfers": where prompts are computed, what phases take, how KV gets across."""

from dashboards.links import DECISIONS_PAGE, REQUEST_TRACES
from dashboards.panels import Board, Panel, Query, Row
from dashboards.promql import WORKER, rate, selected, share

_DONE = 'outcome="done"'

PLACES = Row(
    "Where are prompts computed?",
    (
        Panel(
            title="Where prompts are computed",
            description="kvrouter_prefill_placements_total, with disaggregation.conditional. short, prefill_busy: at "
            "the decode worker; long, decode_busy: at a prefill worker. All of one kind: the thresholds decide "
            "nothing.",
            queries=(Query(rate("prefill_placements_total", by="reason"), "{{reason}}"),),
            kind="stacked",
            unit="reqps",
        ),
        Panel(
            title="Phases that were repeated",
            description="kvrouter_request_turns_total by reason. no_prefill_worker, prefill_failed: a decode worker "
            "computed the prompt, too; decode_failed: the prompt was prefilled again. A steady rate: a worker of that "
            "phase fails, see the dashboard Fleet.",
            queries=(Query(rate("request_turns_total", by="reason"), "{{reason}}"),),
            unit="reqps",
            links=(DECISIONS_PAGE, REQUEST_TRACES),
        ),
    ),
)

PHASES = Row(
    "What do the phases take of the engines?",
    (
        Panel(
            title="Requests by phase",
            description="kvrouter_engine_phase_requests of the newest iteration, by phase. All prefill for long: "
            "decodes wait; use prefill and decode workers, or bound the tokens of a batch.",
            queries=(Query(f"sum by (phase) ({selected('engine_phase_requests', WORKER)})", "{{phase}}"),),
            kind="stacked",
        ),
    ),
)

TRANSFERS = Row(
    "Does KV get from prefill to decode, and how fast?",
    (
        Panel(
            title="Prompts waiting for a decode worker",
            description="kvrouter_kv_contexts_held, kvrouter_kv_contexts_held_tokens by worker; at the right "
            "kvrouter_kv_contexts_total by outcome, of simulated engines. Rising: no decode worker fetches them; "
            "expired: decode workers fail.",
            queries=(
                Query(f"sum by (worker) ({selected('kv_contexts_held', WORKER)})", "{{worker}}"),
                Query(f"sum by (worker) ({selected('kv_contexts_held_tokens', WORKER)})", "{{worker}} tokens"),
                Query(rate("kv_contexts_total", WORKER, by="outcome"), "{{outcome}}, a second", right=True),
            ),
        ),
        Panel(
            title="KV transfers",
            description="kvrouter_kv_transfers_total by outcome; at the right kvrouter_kv_transfers_waiting (of "
            "simulated engines). Waiting for ever: max_tokens_in_buffer is below the longest prompt.",
            queries=(
                Query(rate("kv_transfers_total", WORKER, by="outcome"), "{{outcome}}"),
                Query(
                    f"sum by (worker) ({selected('kv_transfers_waiting', WORKER)})", "{{worker}} waiting", right=True
                ),
            ),
            unit="cps",
        ),
        Panel(
            title="Duration of a KV transfer, mean",
            description="kvrouter_kv_transfer_seconds_total by kvrouter_kv_transfers_total of outcome done, by worker; "
            "of simulated engines in simulated time. Longer than computing the prompt again: use "
            "disaggregation.conditional.",
            queries=(
                Query(
                    share(
                        rate("kv_transfer_seconds_total", WORKER, by="worker"),
                        rate("kv_transfers_total", WORKER, _DONE, by="worker"),
                    ),
                    "{{worker}}",
                ),
            ),
            unit="s",
        ),
    ),
)

PHASES_BOARD = Board(
    uid="kv-router-phases",
    title="KV router: prefill, decode and transfers",
    description="Where prompts are computed, what prefill and decode take of the engines, and how KV gets from one to "
    "the other.",
    rows=(PLACES, PHASES, TRANSFERS),
)
