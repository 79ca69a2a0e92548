"""The modules of the hot path: interpreted in a checkout, machine code (mypyc) in a wheel, from the same source.

| a module belongs here when | because |
|---|---|
| it runs for every request or chunk | there it halves what a request costs; elsewhere it gains nothing |
| it defines no `msgspec.Struct` | mypyc drops the keywords of a class statement (`frozen`, `kw_only`, `array_like`) |
| its classes derive from none outside | such a class stays interpreted, `asyncio.Protocol` too: its shape is enough |
| nothing reads the `__cause__` of its errors | mypyc drops the `from` of a `raise` |

Types of arguments are checked when such a module is called: a wrong type raises `TypeError`.
"""

import importlib
import sys
from typing import Literal

MODULES = (
    "kv_protocol.splitmix",
    "kv_protocol.hashing",
    "kv_protocol.ids",
    "kv_protocol.openai.decoding",
    "kv_protocol.openai.parts",
    "indexer.index.overlap_columns",
    "indexer.native.block_hashes",
    "kv_runtime.text.byte_chat",
    "kv_runtime.text.chat_messages",
    "kv_runtime.clock",
    "kv_runtime.text.content_format",
    "router.attribution.attribution",
    "router.attribution.savings",
    "router.attribution.top_rows",
    "router.drain.recent_prompts",
    "router.live.fleet_columns",
    "router.live.passed_requests",
    "router.planner.offered",
    "router.queue.gate",
    "router.queue.tenants",
    "router.server.plane",
    "router.request.route_request",
    "router.request.bodies",
    "router.request.reader",
    "router.request.attempt",
    "router.request.rank_attempt",
    "router.request.machine",
    "router.request.driver",
    "router.drain.warming",
    "router.pools.endpoints",
    "router.pools.served",
    "router.pools.tries",
    "router.request.calls",
    "router.queue.admission",
    "router.fleet.calibration",
    "router.decision.eligibility",
    "router.request.latency",
    "router.journal.encoder",
    "router.replicas.open_leases",
    "router.request.plan",
    "router.journal.records",
    "router.replicas.replication",
    "router.decision.model_view",
    "router.request.endpoints",
    "router.server.client_connection",
    "router.server.answer_output",
    "router.server.buffered_response",
    "router.server.exchange",
    "router.server.framing",
    "router.server.heads",
    "router.server.stream_replay",
    "router.server.null_sink",
    "router.server.sites",
    "router.server.relay",
    "router.server.request_body",
    "router.server.timeout_sweeper",
    "router.server.upstream",
    "router.journal.writer",
    "router.admin.metrics.decision",
    "router.admin.metrics.prediction",
    "router.admin.metrics.request",
    "router.admin.metrics.weighing",
    "router.names",
    "router.replicas.service",
    "router.request.replies",
    "router.decision.routing",
    "router.request.served",
    "router.endpoint_picker.picked",
    "router.request.serving",
    "router.prompt.prefix_cache",
    "router.prompt.prompts",
    "router.request.usage",
)


def hot_path() -> Literal["compiled", "interpreted"]:
    """Return what the modules that run here are."""
    name = MODULES[0]
    found = (sys.modules.get(name) or importlib.import_module(name)).__file__
    return "interpreted" if found is None or found.endswith(".py") else "compiled"
