"""Every finding: its severity, why it matters, how to mend it. `docs/reference/doctor.md` is this table.

An id never changes its meaning: alerts and scripts go by it.
"""

from collections.abc import Mapping

from router.doctor.findings import Meaning, Severity

_Entries = Mapping[str, tuple[Severity, str, str]]

_LOG: _Entries = {
    "log.unreachable": (
        "error",
        "no worker can register and no KV event arrives; routers go on from memory, which becomes outdated",
        "bring nats-server back, or correct `--nats-url` and `nats.credentials`",
    ),
    "log.no_stream": (
        "error",
        "without `KV_FLEET` no worker is known, without `KV_EVENTS` no index can be built",
        "start a router or an index with this log: it makes its streams; a server without JetStream cannot be used",
    ),
    "log.full": (
        "warning",
        "the log was not purged at three quarters: no snapshot covers its oldest events, which will be dropped",
        "look for `snapshot_failed` in the routers' log; raise `nats.snapshots_bytes_max` or `nats.events_max_bytes`",
    ),
    "log.uncovered": (
        "warning",
        "a router that starts now has no snapshot that the log continues: it asks every agent for a dump",
        "is a router or an index running? `kvrouter_snapshot_failures_total` and its log say why none is written",
    ),
    "log.storage": (
        "warning",
        "the stream is gone when its server stops: registrations, events or the journal with it",
        "remove the stream while the fleet is idle; the next router creates it on disk",
    ),
    "log.store": (
        "warning",
        "a full store refuses every stream: events and registrations are not published any more",
        "raise the account's or the server's `max_file_store`, or lower the streams' `*_max_bytes`",
    ),
    "log.lag": (
        "warning",
        "that reader's index is behind: it routes by an old state of the caches",
        "`kvrouter_freshness_seconds`, `kvrouter_event_loop_lag_seconds`: do router and server have enough CPU?",
    ),
    "log.replicas": (
        "note",
        "the stream is unavailable while that one server is away, and lost with its disk",
        "in a cluster, `nats.replicas: 3`; a single server cannot have more than 1",
    ),
}
_FLEET: _Entries = {
    "fleet.empty": (
        "error",
        "every request is refused with 503 `no_worker`",
        "start agents with this log's `--nats-url`; do the router and they have the same?",
    ),
    "fleet.unreadable": (
        "warning",
        "what the message said is unknown to every router: a worker, a heartbeat or a load may be missing",
        "does its sender have another version, or does something else publish on these subjects?",
    ),
    "worker.silent": (
        "error",
        "after five missed heartbeats routers treat a worker as gone: it gets no request, though it could serve",
        "its agent's log and `/status`: does it reach this log? Else start it anew",
    ),
    "worker.gone": (
        "warning",
        "it died without publishing that it left: it stays registered, and its capacity is missing",
        "start it again, or forget it: `DELETE /v1/workers/{id}` at a router's control plane",
    ),
    "worker.unreachable": (
        "error",
        "its heartbeats come, so it is chosen; every request sent there fails and is tried again elsewhere",
        "is its advertised address (`base_url`) one that routers can reach? Is its HTTP alive? Else drain it",
    ),
    "worker.unhealthy": (
        "error",
        "its agent reports that the engine does not serve: requests sent there fail",
        "the agent's log says why; start it anew",
    ),
    "worker.draining": (
        "note",
        "it takes no new work until it is put back or starts anew",
        "nothing, if it is to leave; else `DELETE /v1/workers/{id}/drain`, or start its agent anew",
    ),
    "worker.withdrawn": (
        "warning",
        "its agent runs and has taken the worker out of the fleet: it gets no request until it registers again",
        "fix what the reason names; if it was removed by hand, stop its agent or start it anew",
    ),
    "worker.two_instances": (
        "error",
        "two processes have one worker id: routers know the last to register, and credit it with the other's cache",
        "give each its own `worker.id`, and start both anew",
    ),
    "worker.one_address": (
        "error",
        "requests for all of them reach the same process: the index describes caches of processes that do not answer",
        "each worker advertises an address of its own (`worker.advertise_host`, `worker.port`); stop the surplus agent",
    ),
    "worker.one_endpoint": (
        "warning",
        "pools, and clients that address workers by endpoint, cannot tell the roles apart",
        "give the workers of each role a name of their own (`worker.endpoint`)",
    ),
    "worker.open": (
        "error",
        "anyone who reaches the address can send requests to the engine, past every limit of the router",
        "set `worker.token` there, and `data.worker_token` at the routers; has something between removed the check?",
    ),
    "rank.silent": (
        "error",
        "its index entry goes stale and is then forgotten, while the worker's other ranks keep it in the fleet",
        "its agent's `/status` and log: the rank's publisher or its thread has stopped; start the agent anew",
    ),
    "rank.unregistered": (
        "warning",
        "routers ignore heartbeats of an instance or a rank that is not registered",
        "start that agent anew: it registers; one that should not be there, stop",
    ),
    "rank.two_heads": (
        "error",
        "two processes publish one rank's stream: each of their heartbeats starts its index entry anew",
        "stop one of them: an agent and a `worker-agent consolidate` or `attach` for the same worker, or two of these",
    ),
}
_PARITY: _Entries = {
    "parity.block_size": (
        "error",
        "the router hashes with one block size: it cannot use the others' events, and prefill cannot hand over",
        "start the engines of a model with one `block_size` (`tokens_per_block`)",
    ),
    "parity.hash_scheme": (
        "error",
        "the router hashes by one scheme: it cannot use the others' events, and their ranks are FALLBACK",
        "the same engine options (EAGLE drafting) and versions for all workers of a model",
    ),
    "parity.canary": (
        "error",
        "it hashes the same tokens differently: the router cannot use its events, and its ranks are FALLBACK",
        "agents and routers of one version",
    ),
    "parity.tokenizer_digest": (
        "error",
        "router and worker make different tokens of one prompt: no prefix is found, or answers are to another prompt",
        "the same model directory for all: `tokens.text` at routers, the engine's text at agents",
    ),
    "parity.template_digest": (
        "error",
        "router and worker make different prompts of one chat: no prefix is found, or answers differ",
        "the same chat template for all: `tokens.text` at routers, the engine's text at agents",
    ),
    "parity.prompt_ids": (
        "error",
        "its engine makes other token ids of a chat than the router: chats of the model are routed by their text",
        "what the engine was started with, also at the router: template, tokenizer, template variables (`tokens.text`)",
    ),
    "parity.kv_events": (
        "error",
        "the blocks of its requests appear at another worker: predictions of both are wrong",
        "each engine's own event address: two were swapped, or one was copied (`kv-events`, `--kv-events`)",
    ),
    "parity.images": (
        "error",
        "images become different tokens: no prefix with images is found, and ranks that differ are FALLBACK",
        "the same model and processor settings for all workers of a model; agents of one version",
    ),
    "version.engine": (
        "warning",
        "engines of several versions may answer, reuse blocks and hand over KV differently",
        "finish the update; until then, give prefill and decode of one version a `worker.transfer_domain` of their own",
    ),
    "version.range": (
        "warning",
        "other versions of TensorRT-LLM know other arguments, handovers and events: requests may fail there",
        'install a supported version of `tensorrt-llm`; `docs/TENSORRT_LLM.md`, "Versions", has the range',
    ),
    "version.router": (
        "warning",
        "wire formats may differ between versions, and routers that choose differently compete for caches",
        "finish the update",
    ),
}
_PAIRS: _Entries = {
    "pair.buffer": (
        "error",
        "a longer prompt is never transferred: its blocks stay in use on both sides, until transfers stop under load",
        "`cache_transceiver_config.max_tokens_in_buffer` at the longest input or above, or a smaller `max_seq_len`",
    ),
    "pair.dtype": (
        "error",
        "the decode worker refuses KV of another type: the pair is not used, the decode worker computes the prompt",
        "the same `kv_cache_config.dtype` for prefill and decode",
    ),
    "pair.dtype_auto": (
        "warning",
        "`auto` is the checkpoint's type: if it differs from the other's, the decode worker refuses the KV",
        "name `kv_cache_config.dtype` on both sides",
    ),
    "pair.backend": (
        "error",
        "the backends cannot exchange KV: the pair is not used, the decode worker computes the prompt",
        "the same `cache_transceiver_config.backend` for prefill and decode",
    ),
    "pair.reuse": (
        "warning",
        "a worker that reuses no blocks has no overlap with any prompt: routing by prefix is load balancing there",
        "`kv_cache_config.enable_block_reuse: true`, or another `policy.mode`",
    ),
    "pair.prefill_alone": (
        "error",
        "a prefill worker answers no request: its GPU idles, and without aggregated workers every request is refused",
        "start decode workers for the model, or give the worker the role aggregated",
    ),
    "pair.decode_alone": (
        "warning",
        "decode workers compute the prompts themselves, and long ones delay the streams that they decode",
        "start prefill workers for the model, or give the workers the role aggregated",
    ),
    "pair.prefill_domain": (
        "error",
        "no decode worker can fetch what it computes: requests that it prefills are refused or computed again",
        "start decode workers in its `worker.transfer_domain`, or give it the domain of the existing ones",
    ),
    "pair.decode_domain": (
        "warning",
        "no prefill worker's KV reaches it: it decodes only what it computes itself, mostly nothing",
        "start prefill workers in its `worker.transfer_domain`, or give it the domain of the existing ones",
    ),
}
_EVENTS: _Entries = {
    "events.none": (
        "warning",
        "its blocks are guessed from what was sent there: evictions and other routers' requests are not seen",
        "let the engine publish KV events (TensorRT-LLM: `--publish-kv-events`), or choose by load (`policy.mode`)",
    ),
    "events.silent": (
        "warning",
        "the index believes that a full cache is empty: its prefixes are computed again elsewhere",
        "the engine's event settings (`event_buffer_max_size`, `enable_block_reuse`); the agent's `/status`",
    ),
    "events.lost": (
        "warning",
        "the rank has half credit until its blocks are learnt again, which cannot end while events are lost",
        '`docs/RUNBOOKS.md`, "The agent": the row of the counter says which bound to raise',
    ),
    "rank.source": (
        "warning",
        "the rank's own consolidator doubts what it holds: the rank is DEGRADED, with half credit",
        "the reason, with the agent's `/status` and log; `docs/RUNBOOKS.md` has a table of them",
    ),
    "rank.fallback": (
        "warning",
        "its overlap is what was routed to it, not what it holds",
        '`docs/RUNBOOKS.md`, "Is every rank trusted?", by the reason',
    ),
    "rank.degraded": (
        "warning",
        "its overlap is the last known one, at half credit; this state should pass within seconds",
        '`docs/RUNBOOKS.md`, "Is the index current?", by the reason',
    ),
    "stream.recoveries": (
        "warning",
        "the rank's stream loses batches again and again; each time it is DEGRADED, and healing costs both sides",
        "`kvrouter_outbox_dropped_total` of its agent, the log's bounds; two publishers on one rank",
    ),
}
_ROUTERS: _Entries = {
    "router.unreachable": (
        "error",
        "clients or operators get no answer there",
        "start it, or correct `--router` and `--data`",
    ),
    "router.not_ready": (
        "error",
        "a balancer sends it nothing; requests that come all the same are refused, or routed by half an index",
        "see the reason: an index that catches up is done soon; else look at the findings of its workers",
    ),
    "router.open": (
        "error",
        "anyone who reaches the address can read decisions, drain workers and change the policy",
        "bind `control.host` to loopback, or set `control.token`; a proxy in front must not remove the check",
    ),
    "router.other_fleet": (
        "error",
        "the router and these workers do not read the same log: it will never send them anything",
        "the same `nats.url` for routers and agents",
    ),
    "index.full": (
        "warning",
        "prefixes that ranks hold are unknown: they are computed again",
        "raise `index.memory_bytes_max`, or let fewer ranks share a router",
    ),
    "index.nearly_full": (
        "warning",
        "beyond the limit new blocks are refused, and ranks are overfull or refused",
        "raise `index.memory_bytes_max`, or let fewer ranks share a router",
    ),
    "breaker.open": (
        "warning",
        "the rank failed, or answered 429 or 503: the other ranks do its work",
        "the worker's log; if it goes on, drain it: `POST /v1/workers/{id}/drain`",
    ),
    "queue.full": (
        "warning",
        "beyond its bound, requests are refused with 429 or 503",
        'add workers or routers; `docs/OPERATIONS.md`, "Requests that wait"',
    ),
    "journal.off": (
        "note",
        "no decision can be replayed, and only the newest can be explained",
        "`journal.enabled: true`",
    ),
    "clock.skew": (
        "warning",
        "times that cross hosts are wrong by it: freshness, times in journal and log, `indexer at --time`",
        "NTP or chrony on every host",
    ),
}
CATALOGUE: Mapping[str, Meaning] = {
    check: Meaning(*entry)
    for part in (_FLEET, _ROUTERS, _PARITY, _PAIRS, _EVENTS, _LOG)
    for check, entry in part.items()
}
