"""A worker drains: what it alone holds is computed by others over real sockets, within its budget and its time."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from indexer.embedded import hash_blocks
from kv_protocol.fleet import WorkerDraining, WorkerRegistered
from kv_protocol.hashing import Hashing, hash_seed, pack_tokens
from kv_protocol.journal import FleetApplied
from kv_runtime.supervise import TaskSetFull
from kv_runtime.telemetry import Projection
from router.decision.policy import Policy
from router.drain.handover import HANDOVERS_MAX, Handover, HandoverStatus
from router.prompt.chains import EncodedPrompt, RecentPrompt, RecentPrompts
from tests.unit.router.plane import NOW_S, Plane, running_plane, until
from tests.unit.router.role_workers import RoleWorker
from tests.unit.router.samples import BLOCK_SIZE, MODEL, rank, route
from tests.unit.router.upstream import Exchange, Script, Upstream, answers, completion, says_and_waits

TTFT = "kvrouter_time_to_first_token_seconds"
GIVEN_UP = "local: given up: it took too long, or the router stops"


def asked(number: int, blocks: int = 4, *, age_s: float = 0.0, lora: str = "", salt: str = "") -> RecentPrompt:
    """Return a prompt of so many full blocks and a few tokens; those of different numbers have nothing in common."""
    ids = pack_tokens([number * 1000 + at for at in range(blocks * BLOCK_SIZE + 3)])
    hashing = Hashing(BLOCK_SIZE)
    count, hashes, _ = hash_blocks(ids, hashing, hash_seed(lora, salt))
    prompt = EncodedPrompt(ids, count, hashing, hashes)
    return RecentPrompt(lora or MODEL, lora, salt, prompt, NOW_S - age_s)


class Draining:
    """A router with workers by name, of which w0 is to be drained."""

    def __init__(self, plane: Plane) -> None:
        self.plane, self.recent = plane, RecentPrompts(1 << 20)
        self.handover = Handover(plane.serving, self.recent, plane.server.upstreams, 200_000)
        Projection(plane.registry, self.handover.families)
        self.upstreams: dict[str, Upstream] = {}

    @property
    def w0(self) -> WorkerRegistered:
        """The worker that is to be drained."""
        worker = self.plane.state.fleet.worker("w0")
        assert worker is not None
        return worker.registration

    async def drain(self, budget_tokens: int = 1000, within_s: float = 30.0) -> HandoverStatus:
        """Drain w0, and return what became of it."""
        event = WorkerDraining(worker_id="w0", instance=self.w0.instance)
        self.plane.routing.apply(FleetApplied(now_s=NOW_S, event=event))
        self.handover.begin(self.w0, budget_tokens, within_s)
        await until(lambda: self.status().state == "over")
        return self.status()

    def status(self) -> HandoverStatus:
        """Return how far it is."""
        told = self.handover.status("w0", self.w0.instance)
        assert told is not None
        return told

    def bodies(self, name: str) -> list[dict[str, Any]]:
        """Return what a worker was asked."""
        return [json.loads(received.body) for received in self.upstreams[name].received]

    def prefixes(self) -> dict[str, int]:
        """Return the counts of the metrics."""
        outcomes = ("warmed", "failed", "skipped")
        return {name: int(self.plane.metric("handover_prefixes_total", outcome=name)) for name in outcomes}


@asynccontextmanager
async def draining(
    *scripts: Script,
    holds: tuple[int, ...] = (4, 0, 0),
    roles: tuple[str, ...] = (),
    joined: dict[str, Any] | None = None,
    policy: Policy | None = None,
    warmers: int = 4,
) -> AsyncIterator[Draining]:
    """Run a router and a worker for each script: w0 drains, and holds four blocks of every prompt, the others none."""
    async with AsyncExitStack() as stack:
        stack.enter_context(patch("router.drain.handover.WARMERS", warmers))
        plane = await stack.enter_async_context(running_plane(policy=policy))
        found = Draining(plane)
        for number, script in enumerate(scripts):
            name, role = f"w{number}", roles[number] if roles else "aggregated"
            upstream = found.upstreams[name] = await stack.enter_async_context(Upstream(script))
            plane.join(name, upstream.base_url, holds=holds[number], role=role, **(joined or {}))
        stop = asyncio.Event()
        running = asyncio.ensure_future(found.handover.run(stop))
        await asyncio.sleep(0)
        try:
            yield found
        finally:
            stop.set()
            await running


async def test_what_only_the_draining_worker_holds_is_computed_elsewhere() -> None:
    async with draining(answers(500), RoleWorker()) as found:
        found.recent.add(asked(1))
        told = await found.drain()
        (body,) = found.bodies("w1")
        assert body["prompt"] == list(range(1000, 1000 + 4 * BLOCK_SIZE + 1)), "its blocks, and one token behind them"
        assert (body["model"], body["max_tokens"], "cache_salt" in body) == (MODEL, 1, False)
        (received,) = found.upstreams["w1"].received
        assert (received.path, received.headers["x-dp-rank"]) == ("/v1/completions", "0")
        assert (told.listed, told.warmed, told.failed, told.skipped) == (1, 1, 0, 0)
        assert (told.prompts, told.spent_tokens, told.budget_tokens) == (1, 4 * BLOCK_SIZE, 1000)
        (prefix,) = told.prefixes
        assert (prefix.blocks, prefix.new_blocks, prefix.held_blocks, prefix.elsewhere_blocks) == (4, 4, 4, 0)
        assert (prefix.outcome, prefix.worker, prefix.reason) == ("warmed", "w1/0", "")
        assert found.plane.outcome("handover-w0").outcome == "ok"
        assert found.prefixes() == {"warmed": 1, "failed": 0, "skipped": 0}
        assert found.plane.metric("handover_tokens_total") == 4 * BLOCK_SIZE


async def test_the_first_token_of_a_warmed_prompt_counts_for_the_policys_mode() -> None:
    async with draining(answers(500), answers(200, completion(), x_kv_decode_ms="0")) as found:
        found.recent.add(asked(1))
        await found.drain()
        samples = [each for family in found.plane.registry.collect() for each in family.samples]
        counts = {each.labels["mode"]: each.value for each in samples if each.name == f"{TTFT}_count"}
        assert (counts.get(""), counts["kv"]) == (None, 1)


@pytest.mark.parametrize(("held", "elsewhere"), [(4, 4), (2, 3), (0, 0)])
async def test_what_another_holds_too_is_not_listed(held: int, elsewhere: int) -> None:
    async with draining(answers(500), answers(500), holds=(held, elsewhere)) as found:
        found.recent.add(asked(1))
        told = await found.drain()
        assert (told.prompts, told.listed, found.bodies("w1")) == (1, 0, [])


async def test_what_only_an_unfit_worker_holds_too_is_handed_over() -> None:
    async with draining(answers(500), answers(500), RoleWorker(), holds=(4, 4, 0)) as found:
        found.recent.add(asked(1))
        draining_too = WorkerDraining(worker_id="w1", instance="w1-1")
        found.plane.routing.apply(FleetApplied(now_s=NOW_S, event=draining_too))
        assert (await found.drain()).warmed == 1
        assert len(found.bodies("w2")) == 1


async def test_the_hottest_prompts_are_computed_first_and_no_more_than_the_budget_allows() -> None:
    async with draining(answers(500), RoleWorker(), warmers=1) as found:
        for number, age_s in ((1, 600.0), (2, 0.0), (3, 300.0)):
            found.recent.add(asked(number, age_s=age_s))
        told = await found.drain(budget_tokens=2 * 4 * BLOCK_SIZE)
        assert [body["prompt"][0] for body in found.bodies("w1")] == [2000, 3000]
        assert (told.prompts, told.listed, told.spent_tokens) == (3, 2, told.budget_tokens)


async def test_what_costs_more_than_is_left_is_skipped() -> None:
    async with draining(answers(500), answers(500), answers(500), holds=(4, 2, 0)) as found:
        found.recent.add(asked(1))
        busy = route(4000, sequence_hashes=b"", pinned_worker="w1")
        lease = found.plane.routing.take(found.plane.routing.decide(busy))
        told = await found.drain(budget_tokens=2 * BLOCK_SIZE)
        lease.end("ok")
        assert (told.listed, told.skipped, told.spent_tokens) == (1, 1, 0)
        assert told.prefixes[0].reason == "64 tokens, of which 32 are left"


@pytest.mark.parametrize(("status", "reason"), [(500, "first_byte: status 500"), (400, "status 400")])
async def test_a_worker_that_does_not_compute_a_prompt_is_not_replaced_by_another(status: int, reason: str) -> None:
    async with draining(answers(500), answers(status), answers(status)) as found:
        found.recent.add(asked(1))
        told = await found.drain()
        assert (told.warmed, told.failed, told.prefixes[0].reason) == (0, 1, reason)
        assert len(found.bodies("w1")) + len(found.bodies("w2")) == 1


async def test_a_warming_that_takes_too_long_is_given_up_and_counts_against_no_worker() -> None:
    async with draining(answers(500), says_and_waits(b"")) as found:
        for number in range(8):
            found.recent.add(asked(number))
        told = await found.drain(within_s=0.01)
        assert (told.failed, told.prefixes[0].reason) == (8, GIVEN_UP)
        assert found.plane.unfit("w1") == ""
        await found.upstreams["w1"].gone.wait()


async def test_what_has_not_begun_when_the_time_is_over_is_skipped() -> None:
    async with draining(answers(500), RoleWorker(), warmers=1) as found:

        async def slow() -> None:
            await found.plane.clock.advance(2.0)

        worker = RoleWorker()
        worker.waits = slow
        found.upstreams["w1"].script = worker
        for number in range(4):
            found.recent.add(asked(number))
        told = await found.drain(within_s=3.0)
        assert (told.warmed, told.skipped, told.seconds) == (2, 2, 4.0)
        assert told.prefixes[3].reason == "the time is over"


async def test_looking_for_prefixes_leaves_half_of_the_time_to_compute_those_of_the_newest_prompts() -> None:
    async with draining(answers(500), RoleWorker()) as found:
        for number in range(640):
            found.recent.add(asked(number))
        draining_it = asyncio.ensure_future(found.drain(within_s=20.0))
        await until(lambda: found.handover.status("w0") is not None)
        while found.status().state == "looking" and found.status().seconds <= 10.0:
            await found.plane.clock.advance(1.0)
        told = await draining_it
        assert (0 < told.prompts < 640, told.failed, told.prefixes[0].outcome) == (True, 0, "warmed")
        assert found.bodies("w1")[0]["prompt"][0] == 639_000


async def test_no_more_prompts_are_computed_at_a_time_than_allowed() -> None:
    running, most, all_there = 0, 0, asyncio.Event()

    async def script(exchange: Exchange) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            all_there.set()
        await all_there.wait()
        await exchange.answer()
        running -= 1

    async with draining(answers(500), script, warmers=3) as found:
        for number in range(9):
            found.recent.add(asked(number))
        assert (await found.drain()).warmed == 9
        assert most == 3


async def test_a_prompt_is_asked_for_under_its_own_name_and_salt() -> None:
    async with draining(answers(500), RoleWorker(), joined={"loras": ("adapter",)}) as found:
        found.recent.add(asked(1, lora="adapter", salt="s"))
        assert (await found.drain()).warmed == 1
        (body,) = found.bodies("w1")
        assert (body["model"], body["cache_salt"]) == ("adapter", "s")


async def test_prompts_of_other_models_and_block_sizes_are_left_out_and_all_without_another_worker() -> None:
    async with draining(answers(500), answers(500)) as found:
        found.recent.add(replace(asked(1), model="another"))
        other = asked(2)
        found.recent.add(replace(other, prompt=replace(other.prompt, hashing=Hashing(BLOCK_SIZE * 2))))
        assert (await found.drain()).prompts == 0
    async with draining(answers(500)) as found:
        found.recent.add(asked(1))
        assert (await found.drain()).prompts == 0


async def test_all_ranks_of_the_worker_leave() -> None:
    async with draining(answers(500), RoleWorker(), joined={"dp_ranks": (0, 1)}) as found:
        found.plane.index.held[rank("w0/1")] = 2
        found.recent.add(asked(1))
        told = await found.drain()
        (prefix,) = told.prefixes
        assert (prefix.held_blocks, prefix.worker in {"w1/0", "w1/1"}) == (4, True)


async def test_prefill_workers_are_warmed_and_what_they_hold_for_a_decode_worker_is_fetched() -> None:
    roles = ("prefill", "prefill", "decode")
    decoder = RoleWorker("decode")
    async with draining(answers(500), RoleWorker("prefill"), decoder, roles=roles) as found:
        found.recent.add(asked(1))
        told = await found.drain()
        assert (told.warmed, told.prefixes[0].worker) == (1, "w1/0")
        assert [body["max_tokens"] for body in (*found.bodies("w1"), *found.bodies("w2"))] == [1, 2]
        assert decoder.fetched == [1]


async def test_a_decode_worker_that_does_not_fetch_changes_nothing() -> None:
    roles = ("prefill", "prefill", "decode")
    async with draining(answers(500), RoleWorker("prefill"), answers(500), roles=roles) as found:
        found.recent.add(asked(1))
        assert (await found.drain()).warmed == 1


@pytest.mark.parametrize(
    ("role", "mode", "reason"),
    [
        ("decode", "kv", "role decode: prompts are computed elsewhere"),
        ("aggregated", "round-robin", "policy.mode round-robin reads no overlap"),
    ],
)
async def test_without_overlap_and_by_a_decode_worker_nothing_is_handed_over(role: str, mode: Any, reason: str) -> None:
    async with draining(answers(500), answers(500), roles=(role, role), policy=Policy(mode=mode)) as found:
        found.recent.add(asked(1))
        assert (await found.drain()).reason == reason


async def test_what_a_running_request_had_asked_is_handed_over_once_it_is_over() -> None:
    async with draining(answers(500), RoleWorker(), holds=(0, 0)) as found:
        found.recent.add(asked(1))
        lease = found.plane.routing.take(found.plane.routing.decide(route(pinned_worker="w0")))
        draining_it = asyncio.ensure_future(found.drain())
        await until(lambda: bool(found.plane.clock.sleepers))
        assert (found.status().state, found.status().listed) == ("waiting", 0)
        found.plane.index.held[rank("w0/0")] = 4
        lease.end("ok")
        await found.plane.clock.advance(0.1)
        assert (await draining_it).warmed == 1


async def test_a_second_look_asks_for_what_failed_and_not_for_what_was_computed_and_has_no_events_yet() -> None:
    async with draining(answers(500), RoleWorker()) as found:
        found.recent.add(asked(1, blocks=3))
        found.recent.add(asked(1))
        found.recent.add(asked(2, blocks=2))
        lease = found.plane.routing.take(found.plane.routing.decide(route(pinned_worker="w0")))
        worker = RoleWorker()
        worker.fault = answers(500)  # the first one
        found.upstreams["w1"].script = worker
        draining_it = asyncio.ensure_future(found.drain())
        await until(lambda: bool(found.plane.clock.sleepers))
        assert (found.status().listed, found.status().failed, found.status().warmed) == (2, 1, 1)
        lease.end("ok")
        await found.plane.clock.advance(0.1)
        told = await draining_it
        assert (told.listed, told.failed, told.warmed) == (3, 1, 2)
        starts = [body["prompt"][0] for body in found.bodies("w1")]
        assert sorted(starts) in ([1000, 1000, 2000], [1000, 2000, 2000]), "what failed, and nothing else, comes twice"


async def test_a_request_that_runs_on_is_waited_for_as_long_as_the_hand_over_may_take() -> None:
    async with draining(answers(500), RoleWorker()) as found:
        lease = found.plane.routing.take(found.plane.routing.decide(route(pinned_worker="w0")))
        draining_it = asyncio.ensure_future(found.drain(within_s=2.0))
        await until(lambda: bool(found.plane.clock.sleepers))
        await found.plane.clock.advance(2.5)
        assert (await draining_it).seconds == pytest.approx(2.0, abs=0.1)
        lease.end("ok")


async def test_what_is_on_its_way_to_another_is_not_listed() -> None:
    async with draining(answers(500), answers(500)) as found:
        found.recent.add(asked(1))
        wish = route(67, sequence_hashes=asked(1).prompt.sequence_hashes, pinned_worker="w1")
        lease = found.plane.routing.take(found.plane.routing.decide(wish))
        assert (await found.drain()).listed == 0
        lease.end("ok")


async def test_a_second_drain_while_one_is_on_its_way_begins_nothing() -> None:
    async with draining(answers(500), says_and_waits(b"")) as found:
        found.recent.add(asked(1))
        found.handover.begin(found.w0, 1000, 30.0)
        await until(lambda: bool(found.upstreams["w1"].received))
        found.handover.begin(found.w0, 5, 5.0)
        assert found.status().budget_tokens == 1000


async def test_a_hand_over_cancelled_before_its_first_step_is_over() -> None:
    async with draining(answers(500)) as found:
        found.handover.begin(found.w0, 1000, 30.0)
        found.handover.cancel("w0", "put back")
        await asyncio.sleep(0)
        assert (found.status().state, found.status().reason) == ("over", "put back")


async def test_a_router_that_stops_gives_up_what_is_on_its_way() -> None:
    async with draining(answers(500), says_and_waits(b"")) as found:
        found.recent.add(asked(1))
        found.handover.begin(found.w0, 1000, 30.0)
        await until(lambda: bool(found.upstreams["w1"].received))
    assert found.status().state == "over"
    assert found.plane.outcome("handover-w0").outcome == "cancelled"
    with pytest.raises(TaskSetFull):
        found.handover.begin(found.w0, 1000, 30.0)


async def test_of_too_many_workers_that_drain_the_last_one_hands_nothing_over() -> None:
    async with draining(answers(500), says_and_waits(b"")) as found:
        found.recent.add(asked(1))
        for number in range(HANDOVERS_MAX):
            found.plane.join(f"x{number}", "http://127.0.0.1:1", holds=4)
        for number in range(HANDOVERS_MAX):
            worker = found.plane.state.fleet.worker(f"x{number}")
            assert worker is not None
            found.handover.begin(worker.registration, 1000, 30.0)
        with pytest.raises(TaskSetFull):
            found.handover.begin(found.w0, 1000, 30.0)


async def test_a_fault_of_ours_ends_one_hand_over_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async with draining(answers(500), RoleWorker()) as found:
        found.recent.add(asked(1))
        with monkeypatch.context() as patched:
            patched.setattr(RecentPrompts, "newest_first", broken)
            assert (await found.drain()).reason == "our fault: ZeroDivisionError; see the log"
        assert (await found.drain()).warmed == 1
