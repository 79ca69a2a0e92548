"""A whole simulated engine under random requests: it reuses at admission what its events, folded, say that it holds."""

from collections import deque
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kv_protocol.events import Tier
from tests.support.amount import examples
from worker_agent.engines.simulated.blocks import NewPool, rank_pool
from worker_agent.engines.simulated.events import EngineEvent
from worker_agent.engines.simulated.identity import EngineNamespace, trtllm_hash
from worker_agent.engines.simulated.scheduler import Simulator
from worker_agent.port.types import EngineDescription, EngineRequest

BLOCK_SIZE = 2
ENGINE = EngineDescription(
    model="m",
    version="1",
    event_source="simulated",
    block_size=BLOCK_SIZE,
    total_kv_blocks=9,
    max_num_seqs=3,
    max_num_batched_tokens=6,
    max_seq_len=18,
    dp_ranks=(0, 1),
)
POOLS: list[NewPool] = [rank_pool, partial(rank_pool, host_blocks=3)]

prompts = st.builds(lambda length, at: tuple(int(i >= at) for i in range(length)), st.integers(1, 9), st.integers(0, 9))
requests = st.builds(
    EngineRequest,
    request_id=st.just(""),
    prompt=prompts,
    max_tokens=st.integers(1, 8),
    dp_rank=st.sampled_from([0, 0, 0, 1]),
    lora_name=st.sampled_from([None, None, None, "lora"]),
    cache_salt=st.sampled_from([None, None, None, "salt"]),
)
steps = st.lists(st.one_of(requests, requests, st.just("step"), st.just("step"), st.integers(0, 5)), max_size=40)


class Fold:
    """What the engine said that it holds, by rank."""

    def __init__(self) -> None:
        self.next_id = {0: 0, 1: 0}
        self.full: dict[int, set[int]] = {0: set(), 1: set()}

    def apply(self, event: dict[str, Any]) -> None:
        rank, data = event["attention_dp_rank"], event["data"]
        assert event["event_id"] == self.next_id[rank]
        self.next_id[rank] += 1
        held = self.full[rank]
        if data["type"] == "stored":
            held |= {block["block_hash"] for block in data["blocks"] if len(block["tokens"]) == BLOCK_SIZE}
        elif data["type"] == "removed":
            held -= set(data["block_hashes"])

    def cached_tokens(self, request: EngineRequest) -> int:
        held = self.full[request.dp_rank or 0]
        path, namespace = [0], EngineNamespace.of(request.lora_name, request.cache_salt)
        for at in range(0, len(request.prompt) - BLOCK_SIZE, BLOCK_SIZE):
            path.append(trtllm_hash(request.prompt[at : at + BLOCK_SIZE], path[-1], namespace))
            if path[-1] not in held:
                path.pop()
                break
        return (len(path) - 1) * BLOCK_SIZE


class Driver:
    """An engine and the fold of what it says; every first admission of an iteration is foretold."""

    def __init__(self, new_pool: NewPool, simulator_class: type[Simulator]) -> None:
        self.simulator = simulator_class(ENGINE, new_pool=new_pool)
        self.fold = Fold()
        self.waiting: dict[int, deque[EngineRequest]] = {0: deque(), 1: deque()}
        self.alive: list[str] = []
        self.foretold: dict[str, int] = {}
        self.read()

    def submit(self, request: EngineRequest, name: str) -> None:
        named = msgspec.structs.replace(request, request_id=name)
        self.simulator.submit(named, 0.0)
        self.waiting[named.dp_rank or 0].append(named)
        self.alive.append(name)

    def cancel(self, which: int) -> None:
        if which < len(self.alive):
            name = self.alive.pop(which)
            self.foretold.pop(name, None)
            self.simulator.cancel(name)
            for queue in self.waiting.values():
                for request in [each for each in queue if each.request_id == name]:
                    queue.remove(request)
            self.simulator.flush_events()
            self.read()

    def step(self) -> None:
        heads = {rank: queue[0] for rank, queue in self.waiting.items() if queue}
        foretold = {rank: self.fold.cached_tokens(head) for rank, head in heads.items()}
        step = self.simulator.step(0.0)
        self.simulator.flush_events()
        for rank, row in enumerate(step.statistics):
            for nth in range(row["numNewActiveRequests"]):
                admitted = self.waiting[rank].popleft()
                if nth == 0:
                    self.foretold[admitted.request_id] = foretold[rank]
            assert row["numQueuedRequests"] == len(self.waiting[rank])
        for name, output in step.outputs:
            if name in self.foretold:
                assert output.cached_tokens == self.foretold.pop(name)
            if output.finish_reason:
                self.alive.remove(name)
        self.read()

    def read(self) -> None:
        for event in self.simulator.drain_events():
            self.fold.apply(msgspec.to_builtins(event))
        for rank in (0, 1):
            held = self.simulator.held_hashes(rank)
            on_host = self.simulator.held_hashes(rank, Tier.HOST)
            assert held | on_host == self.fold.full[rank]


def check(new_pool: NewPool, plan: list[Any], simulator_class: type[Simulator] = Simulator) -> None:
    driver = Driver(new_pool, simulator_class)
    for number, each in enumerate([*plan, *["step"] * 10]):
        if each == "step":
            driver.step()
        elif isinstance(each, int):
            driver.cancel(each)
        else:
            driver.submit(each, str(number))
    while driver.simulator.has_work:
        driver.step()
    assert (driver.alive, driver.foretold) == ([], {})


SEARCH = settings(max_examples=examples(400))


@SEARCH
@given(new_pool=st.sampled_from(POOLS), plan=steps)
def test_an_engine_reuses_at_admission_what_its_events_say_that_it_holds(new_pool: NewPool, plan: list[Any]) -> None:
    check(new_pool, plan)


class TellsLate(Simulator):
    """Planted bug: an iteration's events are visible an iteration later."""

    late: tuple[EngineEvent, ...] = ()

    def flush_events(self) -> None:
        visible, self._visible = self._visible, deque()
        super().flush_events()
        visible.extend(self.late)
        self.late, self._visible = tuple(self._visible), visible


@pytest.mark.planted
def test_the_property_fails_on_a_planted_bug() -> None:
    search = settings(SEARCH, database=None, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)

    @search
    @given(new_pool=st.sampled_from(POOLS), plan=steps)
    def planted_engine(new_pool: NewPool, plan: list[Any]) -> None:
        check(new_pool, plan, TellsLate)

    with pytest.raises((AssertionError, KeyError)):
        planted_engine()
