"""The dashboard "Prefill, decode and transfers": where prompts are computed, what phases take, how KV gets across."""

from dashboards.links import DECISIONS_PAGE, REQUEST_TRACES
from dashboards.panels import Board, Panel, Query, Row
from dashboards.promql import WORKER, quantile, rate, selected, share

_DONE = 'outcome="done"'

PLACES = Row(
    "Where are prompts computed?",
    (
        Panel(
            title="Placements of prompts",
            description="kvrouter_prefill_placements_total, with disaggregation.conditional. short, prefill_busy: at "
            "the decode worker; long, decode_busy: at a prefill worker. All of one kind: the thresholds decide "
            "nothing.",
            queries=(Query(rate("prefill_placements_total", by="reason"), "{{reason}}"),),
            kind="stacked",
            unit="reqps",
        ),
        Panel(
            title="Phases that were planned anew",
            description="kvrouter_request_turns_total by reason. no_prefill_worker, prefill_failed: a decode worker "
            "computed the prompt, too; decode_failed: the prompt was prefilled again. A steady rate: a worker of that "
            "phase fails, see the dashboard Fleet.",
            queries=(Query(rate("request_turns_total", by="reason"), "{{reason}}"),),
            unit="reqps",
            links=(DECISIONS_PAGE, REQUEST_TRACES),
        ),
        Panel(
            title="Time to first token by worker, p95",
            description="kvrouter_worker_time_to_first_token_seconds: of prefill workers the whole prefill, of decode "
            "workers what came after it. Prefill workers rise: too few of them, or long prompts; decode workers rise: "
            "they wait for KV, see below.",
            queries=(Query(quantile(0.95, "worker_time_to_first_token_seconds", WORKER, by="worker"), "{{worker}}"),),
            unit="s",
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
        Panel(
            title="Tokens by phase",
            description="kvrouter_engine_phase_tokens (computed, or waiting) and kvrouter_engine_phase_kv_tokens (in "
            "the cache), by phase. It shows where a batch's time goes; compare with kvrouter_engine_iteration_seconds "
            "on the dashboard Worker agents.",
            queries=(
                Query(f"sum by (phase) ({selected('engine_phase_tokens', WORKER)})", "{{phase}}"),
                Query(
                    f"sum by (phase) ({selected('engine_phase_kv_tokens', WORKER)})", "{{phase}} in cache", right=True
                ),
            ),
        ),
        Panel(
            title="Prompt tokens promised to workers",
            description="kvrouter_ledger_prefill_tokens_queued, by worker: uncached and not yet computed. All at one "
            "prefill worker: its cache draws everything; at all: add prefill workers.",
            queries=(Query(f"sum by (worker) ({selected('ledger_prefill_tokens_queued', WORKER)})", "{{worker}}"),),
        ),
    ),
)

TRANSFERS = Row(
    "Does KV get from prefill to decode, and how fast?",
    (
        Panel(
            title="Prompts held for decode workers",
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
            title="Fetches of KV",
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
            title="KV that was moved",
            description="kvrouter_kv_transfer_bytes_total by worker that fetched: of simulated engines, and of "
            "TensorRT-LLM with return_perf_metrics. Near what the network carries: place prefill and decode "
            "workers closer, or compute short prompts at decode workers (disaggregation.conditional).",
            queries=(Query(rate("kv_transfer_bytes_total", WORKER, by="worker"), "{{worker}} bytes"),),
            unit="cps",
        ),
        Panel(
            title="Duration of a fetch, mean",
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
            width=12,
        ),
        Panel(
            title="Bytes a second of a fetch",
            description="kvrouter_kv_transfer_bytes_total by kvrouter_kv_transfer_seconds_total, by worker: how fast "
            "the transport was while it was in use. Far below the network's rate: look at the transport of "
            "cache_transceiver_config.",
            queries=(
                Query(
                    share(
                        rate("kv_transfer_bytes_total", WORKER, by="worker"),
                        rate("kv_transfer_seconds_total", WORKER, by="worker"),
                    ),
                    "{{worker}}",
                ),
            ),
            width=12,
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
