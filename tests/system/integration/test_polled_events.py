"""`/kv_cache_events` polled, all the way into a real index: nothing twice, nothing lost in silence, faults by name."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from indexer.embedded import EmbeddedIndex
from kv_protocol.hashing import sequence_hashes
from kv_protocol.ids import WorkerRank
from kv_runtime.clock import Clock
from kv_runtime.event_log import EventLog
from tests.support.parts import at_work
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.engine_doubles import Fault, TrtllmServeDouble
from tests.system.integration.event_path import running_index, zmq_context
from worker_agent.attached import client as client_module
from worker_agent.attached.client import EVENTS_PATH, EngineClient, FetchOutcome
from worker_agent.engines.servers.trtllm_serve import TrtllmServe
from worker_agent.events.consolidator import Consolidator, WorkerStreams, event_path
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.source_poller import Source

BLOCK = 32
WORKER = WorkerStreams(id="trt-0", model="m", instance="i", block_size=BLOCK, dp_ranks=(0, 1))


@dataclass(frozen=True)
class Polling:
    """An engine that is polled, its streams, and an index that reads them."""

    engine: TrtllmServeDouble
    rules: TrtllmRules
    streams: Consolidator
    client: EngineClient
    index: EmbeddedIndex

    def overlap(self, *blocks: int) -> int:
        """Return how many blocks of this prompt the index finds at rank 0."""
        prompt = sequence_hashes([block for block in blocks for _ in range(BLOCK)], BLOCK)
        return int(self.index.overlap(prompt, [WorkerRank(WORKER.id, 0)])[0].overlap_blocks[0])


@asynccontextmanager
async def polling(broker: Broker, log: EventLog) -> AsyncIterator[Polling]:
    async with (
        TrtllmServeDouble().serving() as engine,
        EngineClient(engine.url, kind="trtllm-serve") as client,
        zmq_context() as context,
        running_index(broker.url) as index,
    ):
        rules = TrtllmRules(BLOCK)
        source = Source(lambda _, timeout_s: client.kv_events(timeout_s), rules)
        streams = event_path(WORKER, source, (), log, context, Clock(), ring_bytes_max=1 << 20)
        await streams.start()
        async with at_work(*streams.parts(0)):
            yield Polling(engine, rules, streams, client, index)


async def test_events_that_another_client_took_clear_the_rank_and_are_counted(broker: Broker, log: EventLog) -> None:
    async with polling(broker, log) as at:
        at.engine.create(0)
        at.engine.store(1, [5])
        await eventually(lambda: at.overlap(5) == 1)
        at.engine.store(9, [6])
        await eventually(lambda: (at.overlap(5), at.overlap(6)) == (0, 1))
        assert (at.rules.events_lost[0], at.rules.counts["event_id_gaps"]) == (7, 1)


@pytest.mark.parametrize(
    ("outcome", "fault"),
    [
        ("status", Fault(status=500)),
        ("unreadable", Fault(body=b"<html>")),
        ("oversize", Fault(body=b" " * (2 << 20))),
        ("slow", Fault(hangs=True)),
    ],
)
async def test_a_poll_that_fails_makes_the_ranks_stale_until_one_does_not(
    broker: Broker, log: EventLog, monkeypatch: pytest.MonkeyPatch, outcome: FetchOutcome, fault: Fault
) -> None:
    monkeypatch.setattr(client_module, "EVENTS_BYTES_MAX", 1 << 20)
    # nothing but a planted fault may be late: the events of an answer that came too late are lost
    monkeypatch.setattr(TrtllmServe, "metrics_answer_s", 2.0 if outcome == "slow" else 10.0)
    async with polling(broker, log) as at:
        at.engine.create(0)
        at.engine.store(1, [5])
        await eventually(lambda: at.overlap(5) == 1)
        at.engine.faults[EVENTS_PATH] = fault
        await eventually(lambda: at.client.requests_total["events", outcome])
        await eventually(lambda: "cannot be polled: POST /kv_cache_events" in at.streams.stale(0))
        at.engine.released.set()
        del at.engine.faults[EVENTS_PATH]
        at.engine.store(2, [6], parent=5)
        await eventually(lambda: at.overlap(5, 6) == 2)
        await eventually(lambda: at.streams.stale(0) == "")
