"""Engine to log on real sockets: what the engine said is what readers hold, whatever hop A and the log did to it."""

import asyncio

import pytest
from structlog.testing import capture_logs

from bench.capture.payloads import encode_payload
from kv_protocol import codec, fleet, recovery, subjects
from kv_protocol.digest import SetDigest, bucket_table
from kv_protocol.events import Removed, Stored
from kv_protocol.ids import WorkerRank
from kv_protocol.recovery import Answer, DumpChunk, RecoverRequest, ReplayChunk
from kv_runtime.clock import SystemClock
from kv_runtime.event_log import BrokerUnavailable, EventLog, LogMessage
from kv_runtime.supervise import run_parts
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.event_path import (
    MODEL,
    RANK,
    WORKER,
    batches_in,
    chain_payloads,
    connected,
    consolidator_on,
    everything,
    hashes_of,
    played,
    publishing,
    running_agent,
    running_index,
    scripted_source,
    stored,
    until_converged,
    zmq_context,
)
from tests.system.integration.scripted_engine import ScriptedEngine
from worker_agent.api.status import streams_status
from worker_agent.events import source_cursor
from worker_agent.events.consolidation import SOLE
from worker_agent.events.dialects.engine_wire import encode_sequence
from worker_agent.events.engine_events import EngineCleared
from worker_agent.events.recoveries import CHUNK_BLOCKS

# ---------------------------------------------------------------- the way through


@pytest.mark.asyncio
async def test_what_the_engine_holds_is_what_readers_hold(broker: Broker, log: EventLog) -> None:
    async with everything(log, ScriptedEngine()) as (source, agent), running_index(broker.url) as index:
        source.engine.store(1, 2, 3)
        source.engine.store(4, parent=2)
        source.engine.remove(3)
        assert await source.position() == {0: (100, 3)}
        await until_converged(index, agent)
        assert [view.overlap_blocks[0] for view in index.overlap(hashes_of(1, 2, 4), [RANK])] == [3]
        assert {block.sequence_hash for block in index.held(RANK)} == {*hashes_of(1, 2), hashes_of(1, 2, 4)[2]}


@pytest.mark.asyncio
async def test_ranks_of_one_publisher_have_streams_of_their_own(broker: Broker, log: EventLog) -> None:
    engine = ScriptedEngine((0, 1, 2))
    async with everything(log, engine) as (source, agent), running_index(broker.url) as index:
        engine.store(1, 2, dp_rank=0)
        engine.store(1, dp_rank=2)
        engine.store(3, parent=2, dp_rank=0)
        assert await source.position() == {0: (100, 2), 1: (101, 0), 2: (102, 1)}
        for dp_rank in (0, 1, 2):
            await until_converged(index, agent, dp_rank)
        ranks = [WorkerRank(WORKER, dp_rank) for dp_rank in (0, 1, 2)]
        assert [view.overlap_blocks[0] for view in index.overlap(hashes_of(1, 2, 3), ranks)] == [3, 0, 1]


@pytest.mark.asyncio
async def test_the_position_covers_all_that_was_emitted_before_it_was_asked_for(log: EventLog) -> None:
    async with everything(log, ScriptedEngine()) as (source, _):
        for block in range(1, 31):
            source.engine.store(block)
            assert await source.position() == {0: (100, block)}


@pytest.mark.asyncio
async def test_positions_asked_for_at_once_all_come(log: EventLog) -> None:
    async with everything(log, ScriptedEngine()) as (source, _):
        source.engine.store(1)
        positions = await asyncio.gather(*(source.position() for _ in range(50)))
    assert positions == [{0: (100, 1)}] * 50


@pytest.mark.asyncio
async def test_an_event_that_cannot_be_read_makes_the_rank_stale_in_its_pulse(broker: Broker, log: EventLog) -> None:
    async with everything(log, ScriptedEngine()) as (source, agent), running_index(broker.url) as index:
        source.engine.store(1)
        source.engine.emit({"type": "stored", "blocks": "nonsense"})
        source.engine.store(2, parent=1)
        assert await source.position() == {0: (100, 2)}
        await eventually(lambda: index.overlap((), [RANK])[0].stale == "source")
        assert set(index.held(RANK)) == agent.held()


# ---------------------------------------------------------------- late, lost, out of order


@pytest.mark.asyncio
async def test_a_late_subscriber_gets_everything_through_replay(broker: Broker, log: EventLog) -> None:
    async with zmq_context() as context, publishing(context) as engine:
        await engine.store(3000)
        consolidator = consolidator_on(log, context, engine.at)
        async with running_agent(log, consolidator) as agent, running_index(broker.url) as index:
            await engine.until_read(agent)
            assert (agent.last_seq(), agent.cursor.lost_total, len(agent.held())) == (3000, 0, 3000)
            await until_converged(index, agent)


@pytest.mark.asyncio
async def test_what_is_published_during_a_replay_is_neither_lost_nor_doubled(broker: Broker, log: EventLog) -> None:
    async with zmq_context() as context, publishing(context) as engine:
        await engine.store(1000)
        consolidator = consolidator_on(log, context, engine.at)
        async with running_agent(log, consolidator) as agent, running_index(broker.url) as index:
            for _ in range(20):
                await engine.store(100)
                await asyncio.sleep(0)
            await engine.until_read(agent)
            assert (agent.last_seq(), agent.cursor.lost_total) == (3000, 0)
            await until_converged(index, agent)


@pytest.mark.asyncio
async def test_what_the_ring_no_longer_has_is_lost_and_readers_converge(broker: Broker, log: EventLog) -> None:
    async with (
        zmq_context() as context,
        publishing(context, ring=20) as engine,
        running_index(broker.url) as index,
    ):
        await engine.store(100)
        async with running_agent(log, consolidator_on(log, context, engine.at)) as agent:
            await engine.until_read(agent)
            assert (agent.cursor.lost_total, agent.epoch()) == (1, 100)
            assert agent.held() == set()  # all that the ring has is under blocks that were lost
            await until_converged(index, agent)


# ---------------------------------------------------------------- a publisher that a test plays


@pytest.mark.asyncio
@pytest.mark.parametrize("order", [[2, 0, 1], [0, 0, 1, 1, 2], [2, 1, 0], [1, 2], [2], []])
async def test_messages_in_any_order_twice_or_never_are_had_once_each(
    broker: Broker, log: EventLog, order: list[int]
) -> None:
    async with played(log) as (source, agent), running_index(broker.url) as index:
        source.ring = chain_payloads(3)
        for sequence in order:
            await source.live(sequence)
        await agent.until_read(3)
        assert (agent.last_seq(), agent.epoch(), agent.cursor.lost_total) == (3, 100, 0)
        assert {block.sequence_hash for block in agent.held()} == set(hashes_of(1, 2, 3))
        await until_converged(index, agent)


@pytest.mark.asyncio
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


@pytest.mark.asyncio
async def test_answers_that_are_no_replay_are_counted_and_cost_nothing(broker: Broker, log: EventLog) -> None:
    async with played(log) as (source, agent), running_index(broker.url) as index:
        source.noise = (
            [b""],
            [b"x", b"", encode_sequence(1), stored(9)],
            [b"", b"", b"\x00" * 7, stored(9)],
            [b"", b"", b"", encode_sequence(1), stored(9)],
        )
        source.ring = {0: stored(1)}
        await agent.until_read(1)
        source.ring |= chain_payloads(3)
        await source.live(2)
        await agent.until_read(3)
        assert len(source.replays_asked) >= 2
        reader, noisy = agent.consolidator.readers[0], len(source.replays_asked) - 1  # the first may have come before
        await eventually(lambda: reader.refused_messages_total >= noisy * len(source.noise))
        await until_converged(index, agent)
        assert index.overlap(hashes_of(1, 2, 3), [RANK])[0].overlap_blocks[0] == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("payload", [b"", b"garbage" * 99, b"\x91" * 100_000])
async def test_a_payload_that_cannot_be_read_makes_the_rank_stale_until_it_is_known_to_be_empty(
    broker: Broker, log: EventLog, payload: bytes
) -> None:
    async with played(log) as (source, agent), running_index(broker.url) as index:
        source.ring = {0: stored(1), 1: payload, 2: stored(2, parent=1)}
        for sequence in range(3):
            await source.live(sequence)
        await agent.until_read(3)
        assert agent.consolidator.core.statistics().origins[SOLE].refused_batches_total == 1
        await eventually(lambda: index.overlap((), [RANK])[0].stale == "source")
        source.ring[3] = encode_payload(1.0, [EngineCleared()], 0)
        await source.live(3)
        await agent.until_read(4)
        await until_converged(index, agent)
        assert agent.held() == set()


@pytest.mark.asyncio
async def test_payloads_of_a_second_rank_are_counted_and_make_the_only_one_stale(log: EventLog) -> None:
    async with played(log) as (source, agent):
        source.ring = {0: stored(1), 1: encode_payload(1.0, [EngineCleared()], 7)}
        for sequence in range(2):
            await source.live(sequence)
        await agent.until_read(2)
        assert agent.consolidator.core.statistics().origins[SOLE].foreign_rank_batches_total == 1
        assert agent.last_seq() == 1
        assert agent.consolidator.core.stale(0) == "engine: dp_rank: found 7 beside 0, allowed one rank"


@pytest.mark.asyncio
async def test_what_no_replay_brings_is_lost_and_what_comes_after_is_had(broker: Broker, log: EventLog) -> None:
    async with played(log) as (source, agent), running_index(broker.url) as index:
        source.ring = {0: stored(1), 3: stored(7), 4: stored(8, parent=7)}
        await source.live(0)
        await agent.until_read(1)
        await until_converged(index, agent)
        await source.live(4)
        await agent.until_read(5)
        assert (agent.epoch(), agent.last_seq(), agent.cursor.lost_total) == (100, 4, 1)
        await until_converged(index, agent)
        assert {block.sequence_hash for block in index.held(RANK)} == set(hashes_of(7, 8))


# ---------------------------------------------------------------- the log is away


@pytest.mark.asyncio
async def test_while_a_replay_goes_on_for_ever_the_rank_is_stale_and_in_time_its_hole_is_given_up(
    broker: Broker, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_cursor, "REPLAY_S", 0.5)
    async with played(log) as (source, agent), running_index(broker.url) as index:
        source.ring = chain_payloads(4)
        del source.ring[1]
        source.is_endless = True
        await source.live(3)
        await eventually(
            lambda: agent.consolidator.stale(0) == "engine: messages are missing, until a replay brings them"
        )
        await agent.until_read(4)
        assert agent.cursor.lost_total == 1
        assert "does not answer" in agent.consolidator.stale(0)
        await eventually(lambda: index.overlap((), [RANK])[0].stale == "source")
        source.is_endless = False
        await eventually(lambda: not agent.consolidator.stale(0))
        await until_converged(index, agent)


@pytest.mark.asyncio
async def test_what_was_emitted_while_the_log_was_away_is_published_in_order_when_it_is_back(
    broker: Broker, log: EventLog
) -> None:
    async with everything(log, ScriptedEngine(per_poll=1)) as (source, agent), running_index(broker.url) as index:
        for block in range(1, 51):
            source.engine.store(block)
        await source.position()
        await agent.until_published()
        await broker.kill()
        await eventually(lambda: not log.is_connected)
        for block in range(51, 151):
            source.engine.store(block)
        assert await source.position() == {0: (100, 150)}
        await broker.start()
        await agent.until_published()
        await until_converged(index, agent)
        assert index.statistics().streams[RANK].counts.gaps == 0
        assert agent.consolidator.streams[0].failures_total > 0
    assert [batch.seq for batch in await batches_in(broker.url)] == list(range(1, 151))


@pytest.mark.asyncio
async def test_while_the_log_is_away_it_is_told_once_that_nothing_is_published(broker: Broker, log: EventLog) -> None:
    async with everything(log, ScriptedEngine()) as (source, agent):
        with capture_logs() as lines:
            await broker.kill()
            await eventually(lambda: not log.is_connected)
            source.engine.store(1)
            await eventually(lambda: agent.consolidator.streams[0].failures_total > 2)
            await broker.start()
            await agent.until_published()
        warnings = [line["event"] for line in lines if line["log_level"] == "warning"]
        assert sorted(warnings) == ["log_lost", "publish_failed"]


@pytest.mark.asyncio
async def test_a_server_that_lost_its_data_and_missed_events_is_no_loss_to_its_readers(
    broker: Broker, log: EventLog
) -> None:
    async with everything(log, ScriptedEngine()) as (source, agent), running_index(broker.url) as index:
        source.engine.store(*range(1, 51))
        await source.position()
        await until_converged(index, agent)
        await broker.kill()
        broker.lose_store()
        await eventually(lambda: not log.is_connected)
        source.engine.remove(50)
        source.engine.store(51, parent=49)
        await source.position()
        await broker.start()
        await agent.until_published()
        await until_converged(index, agent)
        assert len(agent.held()) == 50
        async with running_index(broker.url) as later:
            await eventually(lambda: set(later.held(RANK)) == agent.held())


@pytest.mark.asyncio
async def test_while_the_log_is_away_the_status_says_so_and_what_waits(broker: Broker, log: EventLog) -> None:
    async with everything(log, ScriptedEngine()) as (source, agent):
        source.engine.store(1)
        await source.position()
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
        assert streams_status([agent.consolidator]) == {"log": "connected", "ranks": [rank]}
        await broker.kill()
        await eventually(lambda: not log.is_connected)
        source.engine.store(2)
        await source.position()
        await eventually(lambda: agent.consolidator.streams[0].is_refused)
        waiting = agent.consolidator.core.outbox(0).waiting_bytes
        assert waiting > 0
        away = rank | {"seq": 2, "waiting_bytes": waiting, "is_refused": True}
        assert streams_status([agent.consolidator]) == {"log": "away", "ranks": [away]}
        await broker.start()
        await agent.until_published()
        there = rank | {"seq": 2, "published_seq": 2}
        assert streams_status([agent.consolidator]) == {"log": "connected", "ranks": [there]}


@pytest.mark.asyncio
async def test_a_full_outbox_drops_its_oldest_and_readers_converge_by_a_dump(broker: Broker, log: EventLog) -> None:
    bound = 20_000
    engine = ScriptedEngine(per_poll=1)
    async with everything(log, engine, outbox_bytes=bound) as (source, agent), running_index(broker.url) as index:
        engine.store(1)
        await source.position()
        await agent.until_published()
        await broker.kill()
        await eventually(lambda: not log.is_connected)
        for block in range(2, 1002):
            engine.store(block)
        await source.position()
        statistics = agent.consolidator.core.statistics().ranks[0]
        assert statistics.waiting_bytes <= bound + codec.MESSAGE_BYTES_MAX
        assert statistics.dropped_batches_total > 0
        await broker.start()
        await agent.until_published()
        await until_converged(index, agent)
        assert len(index.held(RANK)) == 1001
        assert agent.consolidator.answers[0].answered_total["dump"] >= 1


@pytest.mark.asyncio
async def test_loss_on_hop_a_while_the_log_is_away_is_told_when_it_is_back(broker: Broker, log: EventLog) -> None:
    async with played(log) as (source, agent), running_index(broker.url) as index:
        source.ring = {0: stored(1)}
        await source.live(0)
        await agent.until_read(1)
        await agent.until_published()
        await until_converged(index, agent)
        await broker.kill()
        await eventually(lambda: not log.is_connected)
        source.ring = {5: stored(7)}
        await source.live(5)
        await agent.until_read(6)
        await broker.start()
        await until_converged(index, agent)
        assert {block.sequence_hash for block in index.held(RANK)} == set(hashes_of(7))


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


@pytest.mark.asyncio
async def test_a_reader_without_blocks_gets_the_whole_set_in_chunks(broker: Broker, log: EventLog) -> None:
    n = codec.BLOCKS_PER_EVENT_MAX + 10
    async with everything(log, ScriptedEngine()) as (source, agent), connected(broker.url) as asking:
        source.engine.store(*range(1, n + 1))
        source.engine.remove(n)
        assert await source.position() == {0: (100, 3)}
        of = -(-(n - 1) // CHUNK_BLOCKS)
        chunks = await dump_of(asking, RecoverRequest(77), of)
        assert [(c.request_id, c.epoch, c.last_seq, c.chunk, c.of) for c in chunks] == [
            (77, 100, 3, at, of) for at in range(of)
        ]
        blocks = [block for chunk in chunks for block in chunk.blocks()]
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


@pytest.mark.asyncio
async def test_a_reader_that_missed_batches_gets_these_batches(broker: Broker, log: EventLog) -> None:
    async with everything(log, ScriptedEngine()) as (source, agent), connected(broker.url) as asking:
        source.engine.store(*range(1, 101))
        source.engine.remove(100)
        source.engine.store(101)
        assert await source.position() == {0: (100, 3)}
        await agent.until_published()
        (part,) = await answers_to(asking, recovery.encode(RecoverRequest(5, epoch=100, after_seq=1)))
        assert isinstance(part, ReplayChunk)
        assert (part.request_id, part.epoch, part.last_seq) == (5, 100, 3)
        replayed = codec.decode_message(part.message)
    assert replayed == (await batches_in(broker.url))[1:]


@pytest.mark.asyncio
async def test_a_reader_that_differs_gets_the_buckets_that_differ(broker: Broker, log: EventLog) -> None:
    async with everything(log, ScriptedEngine()) as (source, _), connected(broker.url) as asking:
        source.engine.store(*range(1, 101))
        assert await source.position() == {0: (100, 1)}
        hashes = hashes_of(*range(1, 101))
        held = bucket_table([SetDigest([*hashes[1:], 7]).buckets, *(SetDigest().buckets for _ in range(3))])
        (chunk,) = await dump_of(asking, RecoverRequest(6, epoch=100, after_seq=1, buckets=held))
        wanted = {hashes[0] >> 56, 0}
        assert chunk.buckets == bytes(sum(1 << (b & 7) for b in wanted if b >> 3 == at) for at in range(32))
        assert {block.sequence_hash for block in chunk.blocks()} == {each for each in hashes if each >> 56 in wanted}


@pytest.mark.asyncio
async def test_a_rank_that_holds_nothing_answers_with_an_empty_dump(broker: Broker, log: EventLog) -> None:
    async with everything(log, ScriptedEngine()), connected(broker.url) as asking:
        (chunk,) = await dump_of(asking, RecoverRequest(1))
    assert (chunk.last_seq, chunk.of, list(chunk.blocks())) == (0, 1, [])


@pytest.mark.asyncio
async def test_an_answer_stops_when_its_asker_asks_again(broker: Broker, log: EventLog) -> None:
    chunks = 3000
    async with everything(log, ScriptedEngine(), chunk_blocks=1) as (source, agent), connected(broker.url) as asking:
        source.engine.store(*range(1, chunks + 1))
        await source.position()
        got: list[DumpChunk] = []

        async def on_message(message: LogMessage) -> None:
            part = recovery.decode_answer(message.data)
            assert isinstance(part, DumpChunk)
            got.append(part)
            if len(got) == 1:
                for again in (1, 2, 2):
                    await asking.announce(subjects.recover(MODEL, RANK), recovery.encode(RecoverRequest(again)), inbox)

        inbox = asking.new_inbox()
        await asking.listen(inbox, on_message)
        await asking.announce(subjects.recover(MODEL, RANK), recovery.encode(RecoverRequest(1)), inbox)
        await eventually(lambda: [chunk.chunk for chunk in got if chunk.request_id == 2] == list(range(chunks)))
        answers = agent.consolidator.answers[0]
        await eventually(lambda: answers.answered_total["dump"] == 1)
        assert len([chunk for chunk in got if chunk.request_id == 1]) < chunks
        assert answers.dropped_total == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("request_data", [b"", b"garbage", b"\x81\xaarequest_id\xff"])
async def test_a_question_that_cannot_be_read_or_answered_is_counted_and_the_next_is_answered(
    broker: Broker, log: EventLog, request_data: bytes
) -> None:
    async with everything(log, ScriptedEngine()) as (_, agent), connected(broker.url) as asking:
        await asking.announce(subjects.recover(MODEL, RANK), request_data, asking.new_inbox())
        await asking.announce(subjects.recover(MODEL, RANK), recovery.encode(RecoverRequest(1)))  # nowhere to answer
        assert len(await dump_of(asking, RecoverRequest(2))) == 1
        assert agent.consolidator.answers[0].refused_total == 2


@pytest.mark.asyncio
async def test_questions_that_cannot_be_read_have_one_line_however_they_differ(broker: Broker, log: EventLog) -> None:
    async with everything(log, ScriptedEngine()) as (_, agent), connected(broker.url) as asking:
        with capture_logs() as lines:
            for at in range(30):
                await asking.announce(subjects.recover(MODEL, RANK), b"\x81\xa1" + bytes([at]), asking.new_inbox())
            await eventually(lambda: agent.consolidator.answers[0].refused_total == 30)
    assert [line["event"] for line in lines if line["event"] == "recover_request_refused"] == [
        "recover_request_refused"
    ]


@pytest.mark.asyncio
async def test_the_pulse_proves_the_set_from_the_start_on(broker: Broker, log: EventLog) -> None:
    pulses = []

    async def on_message(message: LogMessage) -> None:
        pulses.append(fleet.decode_heartbeat(message.data))

    async with connected(broker.url) as listening:
        await listening.listen(subjects.HEARTBEAT_ALL, on_message)
        async with everything(log, ScriptedEngine()) as (source, agent):
            await eventually(lambda: pulses)
            assert (pulses[0].epoch, pulses[0].last_seq, pulses[0].tiers) == (100, 0, ())
            source.engine.store(1, 2)
            await source.position()
            await eventually(lambda: pulses[-1].last_seq == 1)
            assert pulses[-1].tiers == agent.consolidator.core.heartbeat(0).tiers
            assert pulses[-1].tiers[0].block_count == 2


# ---------------------------------------------------------------- the end


@pytest.mark.asyncio
async def test_what_the_engine_flushed_last_is_in_the_log_after_a_stop(broker: Broker, log: EventLog) -> None:
    """As the agent stops: engine events first, then what is published."""
    for life in range(5):
        engine, stop = ScriptedEngine(), asyncio.Event()
        async with zmq_context() as context, asyncio.TaskGroup() as group:
            source = scripted_source(log, context, engine, epoch=1000 * (life + 1))
            await source.path.consolidator.start()
            running = group.create_task(run_parts(source.path.parts(0), stop=stop, drain_s=10.0))
            engine.store(1)
            await source.position()
            for block in range(2, 2 + life * 10):
                engine.store(block)
            engine.store(1000)
            stop.set()
            await running
        last = (await batches_in(broker.url))[-1]
        assert isinstance(last.event, Stored)
        assert last.event.sequence_hashes == tuple(hashes_of(1000)), f"life {life}"
        assert source.path.consolidator.core.outbox(0).last_seq == last.seq == 2 + life * 10


@pytest.mark.asyncio
async def test_a_stop_while_the_log_is_away_does_not_wait_for_it(broker: Broker, log: EventLog) -> None:
    async with everything(log, ScriptedEngine()) as (source, agent):
        await broker.kill()
        await eventually(lambda: not log.is_connected)
        source.engine.store(1)
        await source.position()
        with pytest.raises(BrokerUnavailable):
            await log.publish(subjects.events(MODEL, RANK), b"x")
        began_s = SystemClock().now()
        agent.stop.set()
    assert SystemClock().now() - began_s < 4.0
