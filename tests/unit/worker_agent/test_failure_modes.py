"""What went wrong elsewhere on the agent's side of the event plane, by its number, and does not here.

Each test is one small fact; more of each is in the tests of the part that sees to it. Those that need sockets are in
`tests/system/integration/test_failure_modes.py`; numbers that are not here are the index's.
Source: `docs/SOURCES.md` E7.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from bench.capture.payloads import encode_payload
from kv_protocol.codec import MESSAGE_BYTES_MAX, decode_message
from kv_protocol.events import Cleared, Event, Removed, Stored, Tier
from kv_protocol.hashing import image_pad, local_block_hashes, sequence_hashes
from tests.unit.worker_agent.trtllm_json import (
    BLOCK_SIZE,
    Json,
    block,
    created,
    diff,
    event,
    named,
    numbered,
    removed,
    stored,
    updated,
)
from worker_agent.events.consolidation import SOLE, Consolidation, Origin
from worker_agent.events.dialects.engine_wire import REPLAY_END, encode_sequence, split_replay
from worker_agent.events.dialects.multimodal import mm_hash
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored
from worker_agent.events.source_cursor import AHEAD_MAX, Delivery, SourceCursor
from worker_agent.load.reports import LoadRows

HOST = Origin("host")
UUID = "0b8a9f1e-7c55-4c63-9c61-5f6f0f5a2d11"
DIGEST = "00000000000000ff" + "0" * 48


def tokens(*blocks: int) -> list[int]:
    """Block n is the tokens 10 n, 10 n + 1, ..."""
    return [10 * number + at for number in blocks for at in range(BLOCK_SIZE)]


def chain(*blocks: int, **namespace: Any) -> tuple[int, ...]:
    """Return our names of a sequence of these blocks."""
    return tuple(sequence_hashes(tokens(*blocks), BLOCK_SIZE, **namespace))


def of(*blocks: int, base: int = 100, **fields: object) -> list[Json]:
    """Return the blocks as the engine tells of them; it calls block n `base` + n."""
    return [block(base + number, tokens(number), **fields) for number in blocks]


def told_by_name(*blocks: int, parent: int | None = None, **fields: Any) -> EngineStored:
    """Return a store as a publisher of another kind tells it."""
    return EngineStored(
        block_hashes=tuple(100 + number for number in blocks),
        parent_block_hash=parent,
        token_ids=tuple(tokens(*blocks)),
        block_size=BLOCK_SIZE,
        **fields,
    )


class Agent:
    """What an engine polls, what other publishers tell, and what goes into the log of it."""

    def __init__(self, *, dp_ranks: tuple[int, ...] = (0,)) -> None:
        self.rules = TrtllmRules(BLOCK_SIZE)
        epochs = count(1000)
        self.core = Consolidation(dp_ranks, BLOCK_SIZE, "i", epochs.__next__, origins=(SOLE, HOST))
        self._sequence = count()

    def poll(self, *events: Json) -> None:
        for dp_rank, engine_event in self.rules.translate(list(events)):
            self.tell(engine_event, dp_rank=dp_rank)

    def tell(self, *events: EngineEvent, origin: Origin = SOLE, dp_rank: int = 0) -> None:
        self.core.on_payload(next(self._sequence), encode_payload(1.0, events, dp_rank), origin)

    def messages(self, dp_rank: int = 0) -> list[bytes]:
        messages = []
        while message := self.core.outbox(dp_rank).next_message():
            messages.append(message.payload)
            self.core.outbox(dp_rank).acknowledge(message)
        return messages

    def logged(self, dp_rank: int = 0) -> list[Event]:
        return [batch.event for message in self.messages(dp_rank) for batch in decode_message(message)]

    def held(self, dp_rank: int = 0) -> dict[int, tuple[Tier, ...]]:
        dump = self.core.dump(dp_rank, 1)
        return {row.sequence_hash: row.tiers for chunk in dump for row in chunk.blocks()}


@pytest.fixture
def agent() -> Agent:
    return Agent()


def test_01_each_block_of_an_event_hangs_under_the_one_before_it(agent: Agent) -> None:
    agent.poll(*numbered(stored(*of(1, 2, 3)), stored(*of(4), parent=103)))
    assert agent.logged() == [Stored(chain(1, 2, 3)), Stored(chain(1, 2, 3, 4)[3:], chain(1, 2, 3)[2], 3)]


def test_02_partial_blocks_are_not_published_and_neither_are_their_removals(agent: Agent) -> None:
    partial = block(109, [1, 2])
    agent.poll(*numbered(stored(*of(1), partial), removed(109), removed(101)))
    assert agent.logged() == [Stored(chain(1)), Removed(chain(1))]
    assert agent.core.statistics().ranks[0].counts["engine"].unknown_removal == 0


def test_03_what_hangs_under_an_unknown_parent_is_no_root_and_costs_nothing_else(agent: Agent) -> None:
    agent.poll(*numbered(stored(*of(2), parent=101), stored(*of(3), parent=102), stored(*of(1))))
    assert agent.logged() == [Stored(chain(1))]
    assert agent.core.statistics().ranks[0].counts["engine"].unknown_parent == 2


def test_10_a_block_stored_twice_goes_with_its_second_removal(agent: Agent) -> None:
    agent.poll(*numbered(stored(*of(1)), stored(*of(1)), removed(101)))
    assert set(agent.held()) == set(chain(1))
    agent.poll(*numbered(removed(101), removed(101), first=3))
    assert agent.held() == {}


def test_10_ids_of_events_that_are_filtered_are_no_gap(agent: Agent) -> None:
    agent.poll(
        event(0, created(), window_size=1024),
        event(1, stored(*of(1)), window_size=128),
        event(2, updated(101), window_size=1024),
        event(3, stored(*of(2)), window_size=1024),
    )
    assert agent.rules.counts.event_id_gaps == 0
    assert agent.rules.events_lost == {0: 0}


def test_11_blocks_of_sliding_windows_are_no_prefix(agent: Agent) -> None:
    pools = [event(at, created(), window_size=window) for at, window in enumerate((128, 1024))]
    agent.poll(*pools, event(2, stored(*of(1)), window_size=128), event(3, stored(*of(2)), window_size=1024))
    assert agent.logged() == [Stored(chain(2))]


def test_12_engines_that_name_the_same_content_differently_are_heard_saying_the_same() -> None:
    logged = []
    for base in (100, 900):
        agent = Agent()
        one, two = of(1, 2, base=base)
        agent.poll(*numbered(stored(one, two), removed(base + 2)))
        logged.append(agent.logged())
    assert logged[0] == logged[1] == [Stored(chain(1, 2)), Removed(chain(1, 2)[1:])]


@pytest.mark.parametrize("namespace", [{"lora_name": "adapter"}, {"cache_salt": "tenant"}], ids=["lora", "salt"])
def test_13_an_adapter_or_salt_is_in_every_hash_of_its_chain(agent: Agent, namespace: dict[str, str]) -> None:
    agent.poll(*numbered(stored(*of(1, 2), **namespace), stored(*of(3), parent=102)))
    expected = chain(1, 2, 3, **namespace)
    assert agent.logged() == [Stored(expected[:2]), Stored(expected[2:], expected[1], 2)]
    assert not set(expected) & set(chain(1, 2, 3))


def test_14_images_are_told_apart_by_whatever_names_them_and_a_digest_among_tokens_is_its_pad(agent: Agent) -> None:
    images = [[{"type": "mm_key", "hash": name, "start_offset": 0}] for name in (UUID, DIGEST)]
    agent.poll(*numbered(*(stored(block(at, tokens(1), mm_keys=keys)) for at, keys in enumerate(images))))
    agent.poll(*numbered(stored(block(9, [7, DIGEST, 32_001, 32_002])), first=2))
    padded = sequence_hashes([7, image_pad(mm_hash(DIGEST)), 32_001, 32_002], BLOCK_SIZE)
    expected = [local_block_hashes(tokens(1), BLOCK_SIZE, mm_hashes=[(mm_hash(name),)]) for name in (UUID, DIGEST)]
    assert agent.logged() == [Stored(tuple(hashes)) for hashes in (*expected, padded)]


def test_15_a_store_larger_than_a_message_goes_out_in_parts_with_seqs_of_their_own(agent: Agent) -> None:
    blocks = 150_000
    large = EngineStored(
        block_hashes=tuple(range(1, blocks + 1)),
        parent_block_hash=None,
        token_ids=tuple(token % 65_536 for token in range(BLOCK_SIZE * blocks)),
        block_size=BLOCK_SIZE,
    )
    agent.tell(large)
    messages = agent.messages()
    batches = [batch for message in messages for batch in decode_message(message)]
    assert max(map(len, messages)) <= MESSAGE_BYTES_MAX
    assert [batch.seq for batch in batches] == [1, 2, 3]
    stores = [batch.event for batch in batches if isinstance(batch.event, Stored)]
    assert [store.start for store in stores] == [0, *(len(stores[0].sequence_hashes) * at for at in (1, 2))]
    assert [store.parent for store in stores[1:]] == [store.sequence_hashes[-1] for store in stores[:-1]]
    assert agent.core.heartbeat(0).tiers[0].block_count == sum(len(store.sequence_hashes) for store in stores) == blocks


def test_16_a_message_that_a_full_queue_lost_is_missed_and_asked_for() -> None:
    cursor = SourceCursor()
    cursor.on_live(0, b"0", 0.0)
    assert cursor.on_live(2, b"2", 0.0) == Delivery()
    assert cursor.next_replay(0.0) == 0
    assert [cursor.on_replayed(at, str(at).encode()).payloads for at in (0, 1)] == [(), ((1, b"1"), (2, b"2"))]


@pytest.mark.parametrize("topic", [[], [b""], [b"kv-events"]])
def test_17_a_replay_is_many_answers_with_or_without_a_topic(topic: Sequence[bytes]) -> None:
    answers = [split_replay([b"", *topic, encode_sequence(at), b"payload"]) for at in (0, 1, REPLAY_END)]
    assert answers == [(0, b"payload"), (1, b"payload"), (REPLAY_END, b"payload")]


def test_19_null_diffs_are_no_changes(agent: Agent) -> None:
    agent.poll(*numbered(stored(*of(1)), updated(101), updated(101, diff(0, 1), None), updated(101, None, diff(35, 5))))
    assert agent.held() == {chain(1)[0]: (Tier.HOST,)}
    assert (agent.rules.counts.unreadable, agent.rules.counts.refused) == (0, 0)


def test_20_a_block_size_that_is_not_the_engine_s_is_named_while_nothing_is_published(agent: Agent) -> None:
    agent.poll(*numbered(stored(block(101, range(2 * BLOCK_SIZE)))))
    assert agent.logged() == []
    assert "engine.block_size is 4: is it the engine's tokens_per_block?" in agent.rules.stale(0)


def test_20_a_block_size_that_is_not_a_foreign_engine_s_is_named_too(agent: Agent) -> None:
    wrong = EngineStored(block_hashes=(1,), parent_block_hash=None, token_ids=(1, 2), block_size=2)
    agent.tell(wrong, told_by_name(1))
    assert agent.core.heartbeat(0).stale == "engine: block_size: found 2, allowed 4"
    assert agent.logged() == [Stored(chain(1))]


def test_21_a_clear_of_one_rank_leaves_the_others() -> None:
    agent = Agent(dp_ranks=(0, 1))
    for dp_rank in (0, 1):
        agent.tell(told_by_name(1), dp_rank=dp_rank)
    agent.tell(EngineCleared(), dp_rank=0)
    assert (agent.held(0), set(agent.held(1))) == ({}, set(chain(1)))
    assert (agent.logged(0)[1:], agent.logged(1)[1:]) == ([Cleared()], [])


def test_22_publishers_of_one_process_do_not_mix_their_names_numbers_and_losses(agent: Agent) -> None:
    agent.core.on_payload(0, encode_payload(1.0, [told_by_name(1)], 0), SOLE)
    host = EngineStored(block_hashes=(101,), parent_block_hash=None, token_ids=tuple(tokens(2)), block_size=BLOCK_SIZE)
    agent.core.on_payload(0, encode_payload(1.0, [host], 0), HOST)
    agent.core.on_loss(SOLE)
    assert set(agent.held()) == set(chain(2))
    assert [batch.seq for message in agent.messages() for batch in decode_message(message)] == [1, 2, 3]


def test_23_what_another_tier_still_holds_outlives_an_engine_that_began_anew(agent: Agent) -> None:
    agent.poll(*numbered(created(), stored(*of(1, 2))))
    agent.tell(told_by_name(1, tier=Tier.HOST), origin=HOST)
    agent.poll(*numbered(created(), stored(*of(3))))
    assert agent.held() == {chain(1)[0]: (Tier.HOST,), chain(3)[0]: (Tier.GPU,)}
    assert agent.rules.events_lost.get(0, 0) == 0


def test_24_a_first_store_on_the_host_does_not_orphan_the_gpu_s_children(agent: Agent) -> None:
    agent.tell(told_by_name(1, tier=Tier.HOST), origin=HOST)
    agent.tell(told_by_name(2, parent=101))
    assert agent.held() == {chain(1)[0]: (Tier.HOST,), chain(1, 2)[1]: (Tier.GPU,)}


def test_24_an_alias_outlives_the_first_of_two_removals(agent: Agent) -> None:
    agent.poll(*numbered(stored(*of(1)), stored(*of(1, base=900)), removed(101)))
    assert set(agent.held()) == set(chain(1))
    agent.poll(*numbered(removed(901), first=3))
    assert agent.held() == {}


def test_25_an_offloaded_block_without_a_description_is_not_counted(agent: Agent) -> None:
    agent.tell(named(999, tier=Tier.HOST), origin=HOST)
    assert agent.held() == {}
    assert agent.core.statistics().ranks[0].counts["host"].unknown_name == 1


def test_25_an_offloaded_block_keeps_its_place_where_its_chain_was_cached_already(agent: Agent) -> None:
    agent.poll(*numbered(stored(*of(1, 2))))
    agent.tell(named(102, tier=Tier.HOST), origin=HOST)
    agent.poll(*numbered(removed(102, 101), first=1))
    assert agent.held() == {chain(1, 2)[1]: (Tier.HOST,)}
    assert Stored(chain(1, 2)[1:], chain(1)[0], 1, Tier.HOST) in agent.logged()


def test_26_an_event_that_cannot_be_read_costs_its_batch_nothing(agent: Agent) -> None:
    agent.poll(*numbered(stored(*of(1)), {"type": "stored", "blocks": b"\xff"}, stored(*of(2), parent=101)))
    assert agent.logged() == [Stored(chain(1)), Stored(chain(1, 2)[1:], chain(1)[0], 1)]
    assert agent.rules.stale(0) != ""


def test_27_an_impossible_sequence_is_refused_and_the_next_ones_are_read() -> None:
    cursor = SourceCursor()
    assert cursor.on_live(0, b"0", 0.0).payloads == ((0, b"0"),)
    assert cursor.on_live(AHEAD_MAX + 1, b"?", 0.0) == Delivery()
    assert cursor.on_live(1, b"1", 0.0).payloads == ((1, b"1"),)


def test_27_an_engine_s_absurd_id_clears_and_the_real_ids_after_it_are_heard(agent: Agent) -> None:
    agent.poll(event(0, stored(*of(1))), event(2**40, removed(999)), event(1, stored(*of(2))))
    assert set(agent.held()) == set(chain(2))


def test_28_statistics_without_a_cache_and_nonsense_are_counted_and_no_report_of_zeros() -> None:
    rows = LoadRows("i")
    assert rows.read([None, {"iter": 3, "kvCacheStats": None}, {"iter": 3, "kvCacheStats": {}}]) == []
    assert (rows.skipped["not_a_map"], rows.skipped["cache"], rows.skipped["requests"]) == (1, 1, 1)


def test_28_after_any_bad_event_the_next_poll_is_translated(agent: Agent) -> None:
    nonsense: list[Any] = [None, 7, [], {"event_id": "x"}, {"event_id": 0, "data": {"type": "removed"}}]
    for each in nonsense:
        agent.poll(each)
    agent.poll(event(1, stored(*of(1))))
    assert set(agent.held()) == set(chain(1))


def test_28_removals_of_unknown_blocks_are_only_counted(agent: Agent) -> None:
    agent.tell(EngineRemoved(block_hashes=(1, 2, 3)))
    assert agent.core.statistics().ranks[0].counts["engine"].unknown_removal == 3
