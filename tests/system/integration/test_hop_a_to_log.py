"""Engine to log on real sockets: what the engine said is what readers hold, whatever hop A and the log did to it."""

from typing import Any

import pytest

from kv_protocol import codec, recovery, subjects
from kv_protocol.events import Removed, Stored
from kv_protocol.recovery import Answer, DumpChunk, RecoverRequest
from kv_runtime.clock import Clock
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.event_path import (
    MODEL,
    RANK,
    WORKER,
    batches_in,
    chain_payloads,
    connected,
    hashes_of,
    played,
    polled_agent,
    running_index,
    stored,
    until_converged,
)
from tests.system.integration.scripted_engine import ScriptedEngine
from worker_agent.api.app import streams_status
from worker_agent.events.consolidator import Consolidator
from worker_agent.events.dialects.batches import encode_sequence
from worker_agent.events.recoveries import CHUNK_BLOCKS

# ---------------------------------------------------------------- the way through


async def test_the_position_covers_all_that_was_emitted_before_it_was_asked_for(log: EventLog) -> None:
    async with polled_agent(log, ScriptedEngine()) as agent:
        for block in range(1, 31):
            agent.engine.store(block)
            assert await agent.position() == {0: (100, block)}


async def test_an_event_that_cannot_be_taken_is_kept_out_shown_and_costs_its_batch_nothing(log: EventLog) -> None:
    async with polled_agent(log, ScriptedEngine()) as agent:
        agent.engine.store(1)
        agent.engine.emit({"type": "removed", "block_hashes": [10**5000]})
        agent.engine.store(2, parent=1)
        await agent.position()
        assert agent.holds(1, 2)
        assert agent.stale.startswith("engine: engine event not read: ")
        assert len(agent.stale) < 400
        (shown,) = agent.consolidator.status()[0]["quarantined"]
        assert (shown["number"], shown["reason"], shown["dp_rank"]) == (1, "wrong_type", 0)
        agent.engine.skip(1)  # a jump clears, and with that the doubt is over
        agent.engine.store(3)
        await agent.position()
        await eventually(lambda: agent.stale == "")
        assert agent.poller.work.failures_total == 0


# ---------------------------------------------------------------- a publisher that a test plays


async def test_frames_that_are_no_message_are_counted_and_cost_nothing(broker: Broker, log: EventLog) -> None:
    wrong = [
        [b""],
        [b"", b""],
        [b"", encode_sequence(1)],
        [b"", encode_sequence(1), stored(9), b"more"],
        [b"", b"\x00" * 7, stored(9)],
        [b"", b"\x00" * 9, stored(9)],
        [b"", b"", b""],
        [b"x" * 1000],
    ]
    async with played(log) as (source, agent), running_index(broker.url) as index:
        source.ring = chain_payloads(3)
        for sequence in range(3):
            for frames in wrong:
                await source.send(*frames)
            await source.live(sequence)
        await agent.until_read(3)
        assert agent.consolidator.readers[0].refused_messages_total == 3 * len(wrong)
        assert agent.cursor.gaps_total == 0
        await until_converged(index, agent)
        assert index.overlap(hashes_of(1, 2, 3), [RANK])[0].overlap_blocks[0] == 3


# ---------------------------------------------------------------- the log is away


def streams_of(consolidator: Consolidator) -> dict[str, Any]:
    status = streams_status([consolidator])
    assert status.pop("sources") == consolidator.status()
    return status


async def test_while_the_log_is_away_the_status_says_so_and_what_waits(broker: Broker, log: EventLog) -> None:
    async with polled_agent(log, ScriptedEngine()) as agent:
        agent.engine.store(1)
        await agent.position()
        await agent.until_published()
        rank = {
            "worker_id": WORKER,
            "dp_rank": 0,
            "epoch": 100,
            "seq": 1,
            "published_seq": 1,
            "waiting_bytes": 0,
            "dropped_batches": 0,
            "is_refused": False,
            "stale": "",
        }
        assert streams_of(agent.consolidator) == {"log": "connected", "ranks": [rank]}
        await broker.kill()
        await eventually(lambda: not log.is_connected)
        agent.engine.store(2)
        await agent.position()
        await eventually(lambda: agent.consolidator.streams[0].is_refused)
        waiting = agent.consolidator.core.outboxes[0].unacked_bytes
        assert waiting > 0
        away = rank | {"seq": 2, "waiting_bytes": waiting, "is_refused": True}
        assert streams_of(agent.consolidator) == {"log": "away", "ranks": [away]}
        await broker.start()
        await agent.until_published()
        there = rank | {"seq": 2, "published_seq": 2}
        assert streams_of(agent.consolidator) == {"log": "connected", "ranks": [there]}


async def test_a_full_outbox_drops_its_oldest_and_readers_converge_by_a_dump(broker: Broker, log: EventLog) -> None:
    bound = 20_000
    engine = ScriptedEngine(per_poll=1)
    async with polled_agent(log, engine, outbox_bytes=bound) as agent, running_index(broker.url) as index:
        engine.store(1)
        await agent.position()
        await agent.until_published()
        await broker.kill()
        await eventually(lambda: not log.is_connected)
        for block in range(2, 1002):
            engine.store(block)
        await agent.position()
        outbox = agent.consolidator.core.outboxes[0]
        assert outbox.unacked_bytes <= bound + codec.MESSAGE_BYTES_MAX
        assert outbox.dropped_batches_total > 0
        await broker.start()
        await agent.until_published()
        await until_converged(index, agent)
        assert len(index.held(RANK)) == 1001
        assert agent.consolidator.answers[0].answered_total["dump"] >= 1


# ---------------------------------------------------------------- questions


async def answers_to(log: EventLog, request: bytes, parts: int = 1) -> list[Answer]:
    got: list[Answer] = []

    async def on_message(message: LogMessage) -> None:
        got.append(recovery.decode_answer(message.data))

    inbox = log.new_inbox()
    await log.listen(inbox, on_message)
    await log.announce(subjects.recover(MODEL, RANK), request, inbox)
    await eventually(lambda: len(got) >= parts)
    return got


async def dump_of(log: EventLog, request: RecoverRequest, chunks: int = 1) -> list[DumpChunk]:
    parts = await answers_to(log, recovery.encode(request), chunks)
    return [part for part in parts if isinstance(part, DumpChunk)]


async def test_a_reader_without_blocks_gets_the_whole_set_in_chunks(broker: Broker, log: EventLog) -> None:
    n = codec.BLOCKS_PER_EVENT_MAX + 10
    async with polled_agent(log, ScriptedEngine()) as agent, connected(broker.url) as asking:
        agent.engine.store(*range(1, n + 1))
        agent.engine.remove(n)
        assert await agent.position() == {0: (100, 3)}
        of = -(-(n - 1) // CHUNK_BLOCKS)
        chunks = await dump_of(asking, RecoverRequest(77), of)
        assert [(c.request_id, c.epoch, c.last_seq, c.chunk, c.of) for c in chunks] == [
            (77, 100, 3, at, of) for at in range(of)
        ]
        blocks = [block for chunk in chunks for block in chunk.columns.blocks()]
        assert [block.sequence_hash for block in blocks] == hashes_of(*range(1, n))
        assert [block.parent for block in blocks] == [None, *hashes_of(*range(1, n - 1))]
        answers = agent.consolidator.answers[0]
        await eventually(lambda: answers.answered_total["dump"] == 1)
        assert answers.bytes_total["dump"] == sum(len(recovery.encode(chunk)) for chunk in chunks)
        await agent.until_published()
    first, second, third = [batch.event for batch in await batches_in(broker.url)]
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (len(first.sequence_hashes), second.parent) == (codec.BLOCKS_PER_EVENT_MAX, first.sequence_hashes[-1])
    assert isinstance(third, Removed)


@pytest.mark.parametrize("request_data", [b"", b"garbage", b"\x81\xaarequest_id\xff"])
async def test_a_question_that_cannot_be_read_or_answered_is_counted_and_the_next_is_answered(
    broker: Broker, log: EventLog, request_data: bytes
) -> None:
    async with polled_agent(log, ScriptedEngine()) as agent, connected(broker.url) as asking:
        await asking.announce(subjects.recover(MODEL, RANK), request_data, asking.new_inbox())
        await asking.announce(subjects.recover(MODEL, RANK), recovery.encode(RecoverRequest(1)))  # nowhere to answer
        assert len(await dump_of(asking, RecoverRequest(2))) == 1
        assert agent.consolidator.answers[0].refused_total == 2


# ---------------------------------------------------------------- the end


async def test_a_stop_while_the_log_is_away_does_not_wait_for_it(broker: Broker, log: EventLog) -> None:
    async with polled_agent(log, ScriptedEngine()) as agent:
        await broker.kill()
        await eventually(lambda: not log.is_connected)
        agent.engine.store(1)
        await agent.position()
        with pytest.raises(BrokerUnavailable):
            await log.publish(subjects.events(MODEL, RANK), b"x")
        began_s = Clock().now()
        agent.stop.set()
    assert Clock().now() - began_s < 4.0
