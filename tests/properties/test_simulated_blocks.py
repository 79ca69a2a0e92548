"""Whatever sequences come and go: what the pool tells is what it holds, and what it holds is what it reuses."""

from collections.abc import Sequence
from hashlib import sha256
from itertools import takewhile
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from kv_protocol.hashing import lora_id
from kv_protocol.trtllm_hash import trtllm_block_hash
from worker_agent.core.simulator.blocks import Block, BlockPool, BlockTable, Namespace
from worker_agent.core.simulator.events import EventLog, render

TOTAL_BLOCKS = 10
BLOCK_SIZE = 2

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)
names = st.tuples(st.sampled_from([None, "", "lora"]), st.sampled_from([None, "", "salt"]))


class Mirror:
    """A fold of the events, which knows nothing of the pool."""

    def __init__(self) -> None:
        self.next_id = 0
        self.parents: dict[int, int | None] = {}
        self.full: set[int] = set()

    def apply(self, event: dict[str, Any]) -> None:
        assert event["event_id"] == self.next_id
        self.next_id += 1
        data = event["data"]
        if data["type"] == "stored":
            self._store(data["parent_hash"], data["blocks"])
        elif data["type"] == "removed":
            for block_hash in data["block_hashes"]:
                del self.parents[block_hash]
                self.full.discard(block_hash)
                assert block_hash not in self.parents.values()

    def _store(self, parent: int | None, blocks: list[dict[str, Any]]) -> None:
        for block in blocks:
            assert block["block_hash"] not in self.parents
            assert parent is None or parent in self.full
            self.parents[block["block_hash"]] = parent
            if len(block["tokens"]) == BLOCK_SIZE:
                self.full.add(block["block_hash"])
            parent = block["block_hash"]


def chain(prompt: Sequence[int], lora_name: str | None, cache_salt: str | None) -> list[int]:
    """Return the engine hashes of what a prompt can reuse."""
    salt_id = int.from_bytes(sha256(cache_salt.encode()).digest()[:8], "little") if cache_salt else None
    adapter = lora_id(lora_name) if lora_name else None
    hashes = [0]
    for at in range(0, len(prompt) - BLOCK_SIZE, BLOCK_SIZE):
        block = prompt[at : at + BLOCK_SIZE]
        hashes.append(trtllm_block_hash(block, hashes[-1], lora_task_id=adapter, cache_salt_id=salt_id))
    return hashes[1:]


class Running(msgspec.Struct, eq=False):
    prompt: list[int]
    tokens_max: int
    table: BlockTable
    is_context_stored: bool = False


class PoolMachine(RuleBasedStateMachine):
    """Sequences that share one pool."""

    pool_class = BlockPool
    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.events = EventLog(window_size=64, attention_dp_rank=msgspec.UNSET, total_blocks=TOTAL_BLOCKS)
        self.pool = self.pool_class(TOTAL_BLOCKS, BLOCK_SIZE, self.events)
        self.mirror = Mirror()
        self.running: list[Running] = []

    @rule(target=sequences, prompt=tokens, more=st.integers(0, 6), name=names)
    def admit(self, prompt: list[int], more: int, name: tuple[str | None, str | None]) -> Running:
        tokens_max, namespace = len(prompt) + more, Namespace.of(*name)
        table = self.pool.admit(prompt, tokens_max, namespace)
        while table is None:
            self.leave(self.running[0], self.running[0].prompt)
            table = self.pool.admit(prompt, tokens_max, namespace)
        sequence = Running(prompt, tokens_max, table)
        self.running.append(sequence)
        return sequence

    @rule(sequence=sequences)
    def end_context(self, sequence: Running) -> None:
        if sequence in self.running:
            self.pool.store_context(sequence.table, sequence.prompt)
            sequence.is_context_stored = True

    @rule(sequence=consumes(sequences), output=st.lists(st.integers(0, 1), max_size=6))
    def finish(self, sequence: Running, output: list[int]) -> None:
        if sequence in self.running:
            computed = (sequence.prompt + output)[: sequence.tokens_max]
            for length in range(len(sequence.prompt) + 1, len(computed) + 1):
                self.pool.extend(sequence.table, length)
            self.leave(sequence, computed)

    @rule(sequence=consumes(sequences), computed=st.integers(0, 9))
    def cancel_in_context(self, sequence: Running, computed: int) -> None:
        if sequence in self.running and not sequence.is_context_stored:
            self.leave(sequence, sequence.prompt[:computed])

    def leave(self, sequence: Running, computed: list[int]) -> None:
        self.pool.release(sequence.table, computed)
        self.running.remove(sequence)

    @rule(prompt=tokens, name=names)
    def what_is_told_is_what_is_reused(self, prompt: list[int], name: tuple[str | None, str | None]) -> None:
        self.what_is_told_is_what_is_held()
        reused = [block.engine_hash for block in self.pool.match(prompt, Namespace.of(*name))]
        assert reused == list(takewhile(self.mirror.full.__contains__, chain(prompt, *name)))

    @invariant()
    def what_is_told_is_what_is_held(self) -> None:
        for event in self.events.take():
            self.mirror.apply(render(event))
        assert self.mirror.full == self.pool.held_hashes()

    @invariant()
    def every_block_is_used_cached_or_free(self) -> None:
        now = self.pool.statistics()
        assert now.used_blocks + now.cached_blocks + now.free_blocks == TOTAL_BLOCKS
        assert min(now.used_blocks, now.cached_blocks, now.free_blocks) >= 0
        assert 0 <= now.reserved_blocks <= now.cached_blocks + now.free_blocks
        assert self.running or (now.used_blocks, now.reserved_blocks) == (0, 0)


def test_what_the_pool_tells_is_what_it_holds_and_reuses() -> None:
    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=200, stateful_step_count=40, deadline=None))


class RootFirst(BlockPool):
    """Planted bug: releases from the root, so that the oldest cached block is a parent."""

    def release(self, table: BlockTable, computed: Sequence[int]) -> None:
        self._store(table, computed)
        table.path.reverse()
        super().release(table, ())


class MatchesWholePrompt(BlockPool):
    """Planted bug: reuses the block of the last token, which must be computed."""

    def match(self, prompt: Sequence[int], namespace: Namespace) -> list[Block]:
        return super().match([*prompt, 0], namespace)


class ForgetsSalt(BlockPool):
    """Planted bug: reuses across salts."""

    def match(self, prompt: Sequence[int], namespace: Namespace) -> list[Block]:
        return super().match(prompt, msgspec.structs.replace(namespace, cache_salt=None))


class EvictsSilently(BlockPool):
    """Planted bug: an overcount, for removals are not told."""

    def _allocate(self, table: BlockTable) -> None:
        events, self._events = self._events, EventLog(window_size=0, attention_dp_rank=0, total_blocks=0)
        super()._allocate(table)
        self._events = events


class StoresSilently(BlockPool):
    """Planted bug: an undercount, for the ends of contexts are not told."""

    def store_context(self, table: BlockTable, prompt: Sequence[int]) -> None:
        events, self._events = self._events, EventLog(window_size=0, attention_dp_rank=0, total_blocks=0)
        super().store_context(table, prompt)
        self._events = events


@pytest.mark.parametrize("planted", [RootFirst, MatchesWholePrompt, ForgetsSalt, EvictsSilently, StoresSilently])
def test_the_property_fails_on_a_planted_bug(planted: type[BlockPool]) -> None:
    machine = type("PlantedMachine", (PoolMachine,), {"pool_class": planted})
    search = settings(
        max_examples=500,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine, settings=search)
