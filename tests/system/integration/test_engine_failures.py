"""Each way in which an engine's events go wrong: what is seen, which counter tells, and what it costs.

End to end: a scripted engine, our poller, the consolidation, the log. The table: `docs/RUNBOOKS.md`.
"""

from typing import Any

import pytest

from kv_runtime.event_log import EventLog
from tests.system.integration.broker import eventually
from tests.system.integration.event_path import PolledAgent, polled_agent
from tests.system.integration.scripted_engine import BLOCK_SIZE, ScriptedEngine
from worker_agent.events.quarantine import SHOWN_CHARACTERS_MAX


def block(block_hash: object, tokens: int = BLOCK_SIZE, token: object = 1, **fields: object) -> dict[str, Any]:
    return {"block_hash": block_hash, "tokens": [{"token_id": token}] * tokens, **fields}


def stored(*blocks: dict[str, Any], parent: object = None) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}


def quarantined(agent: PolledAgent) -> dict[str, int]:
    return {reason: count for reason, count in agent.rules.quarantine.counts.items() if count}


async def test_what_was_read_and_not_published_is_no_hole_in_the_ids_and_costs_what_the_source_held_all_the_same(
    log: EventLog,
) -> None:
    engine = ScriptedEngine()
    async with polled_agent(log, engine) as agent:
        engine.store(1)
        engine.store(2, parent=1)
        await agent.position()
        engine.late_errors.append(ZeroDivisionError("ours"))
        engine.remove(2)
        await eventually(lambda: agent.poller.work.failures_total == 1)
        await eventually(lambda: agent.tiers() == {})  # and not: block 2 for ever
        engine.store(3)
        await agent.position()
        assert agent.holds(3)
        assert agent.rules.counts["event_id_gaps"] == 0
        assert agent.stale == ""


# -------------------------------------------------------------------- events that cannot be taken
BOMB: Any = []
for _ in range(5000):
    BOMB = [BOMB]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(stored(block(2**64)), "block_hash", id="a hash beyond u64"),
        pytest.param(stored(block(10**5000)), "wrong_type", id="a hash of 5000 digits"),
        pytest.param(stored(block(1, cache_salt="s" * 100_000)), "too_large", id="a salt of 100 KB"),
        pytest.param({"type": "removed", "block_hashes": [1] * (2**22 + 1)}, "too_large", id="4 million removals"),
        pytest.param({"type": "removed", "block_hashes": BOMB}, "wrong_type", id="nested without end"),
        pytest.param({"type": "exploded"}, "wrong_type", id="an unknown kind"),
    ],
)
async def test_an_event_that_cannot_be_taken_is_kept_out_shown_and_costs_its_batch_nothing(
    log: EventLog, data: Any, reason: str
) -> None:
    engine = ScriptedEngine()
    async with polled_agent(log, engine) as agent:
        engine.store(1)
        engine.emit(data)
        engine.store(2, parent=1)
        await agent.position()
        assert agent.holds(1, 2)
        assert quarantined(agent) == {reason: 1}
        assert agent.stale.startswith("engine: engine event not read: ")
        assert len(agent.stale) < 400
        (shown,) = agent.consolidator.status()[0]["quarantined"]
        assert (shown["number"], shown["reason"], shown["dp_rank"]) == (1, reason, 0)
        assert len(shown["shown"]) <= SHOWN_CHARACTERS_MAX
        engine.skip(1)  # a jump clears, and with that the doubt is over
        engine.store(3)
        await agent.position()
        await eventually(lambda: agent.stale == "")
        assert agent.poller.work.failures_total == 0
