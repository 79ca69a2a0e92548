"""The modules of the hot path: interpreted in a checkout, machine code (mypyc) in a wheel, from the same source.

| a module belongs here when | because |
|---|---|
| it runs for every request or chunk | there it halves what a request costs; elsewhere it gains nothing |
| it defines no `msgspec.Struct` | mypyc drops the keywords of a class statement (`frozen`, `kw_only`, `array_like`) |
| its classes derive from none outside | such a class stays interpreted, `asyncio.Protocol` too: its shape is enough |

Types are checked when such a module is called: what mypy was told is then true, or a `TypeError`.
"""

import importlib
import sys
from typing import Literal

MODULES = (
    "kv_protocol.splitmix",
    "kv_runtime.chat_messages",
    "kv_runtime.clock",
    "kv_runtime.content_format",
    "router.admission",
    "router.asked",
    "router.asking",
    "router.attempt",
    "router.calls",
    "router.core.admission",
    "router.core.affinity",
    "router.core.approximate",
    "router.core.breakers",
    "router.core.chains",
    "router.core.choice",
    "router.core.cost",
    "router.core.decide",
    "router.core.eligibility",
    "router.core.forecasts",
    "router.core.history",
    "router.core.latency",
    "router.core.journal_encoder",
    "router.core.ledger",
    "router.core.newcomers",
    "router.core.open_leases",
    "router.core.plan",
    "router.core.policies",
    "router.core.predictions",
    "router.core.rank_table",
    "router.core.recording",
    "router.core.replication",
    "router.core.reported",
    "router.core.standing",
    "router.core.state",
    "router.endpoints",
    "router.http.client_side",
    "router.http.collected",
    "router.http.exchange",
    "router.http.framing",
    "router.http.heads",
    "router.http.kept",
    "router.http.nobody",
    "router.http.sites",
    "router.http.splice",
    "router.http.sweep",
    "router.http.upstream",
    "router.journal",
    "router.metrics.decision",
    "router.metrics.prediction",
    "router.metrics.request",
    "router.metrics.weighing",
    "router.names",
    "router.replicas",
    "router.replies",
    "router.routing",
    "router.served",
    "router.serving",
    "router.tokens.prefix_cache",
    "router.tokens.prompts",
    "router.usage",
)


def hot_path() -> Literal["compiled", "interpreted"]:
    """Return what the modules that run here are."""
    name = MODULES[0]
    found = (sys.modules.get(name) or importlib.import_module(name)).__file__
    return "interpreted" if found is None or found.endswith(".py") else "compiled"
