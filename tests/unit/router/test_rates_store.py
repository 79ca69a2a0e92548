"""What was learnt of a model survives a restart, as a recorded fact; a file that cannot be used is reported."""

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from kv_protocol.journal import JournalRecord, LearntRates, OutcomeKnown, RatesRestored
from router.decision.policy import Policy
from router.decision.routing import Routing
from router.decision.state import RouterState
from router.feeds.feeds import MODELS_MAX, WRITE_S, RatesStore
from tests.support.manual_clock import ManualClock
from tests.unit.router.plane import until
from tests.unit.router.samples import MODEL, ask, joined, registered, route

LEARNT = LearntRates(MODEL, 2.0, 0.5, 200.0, 7)


def workers() -> RouterState:
    return joined(registered(), lease_s=1e9)


class Life:
    """A router from its start until it ends."""

    def __init__(self, directory: Path | None) -> None:
        self.clock, self.records = ManualClock(), list[JournalRecord]()
        index: Any = None  # not asked here
        self.routing = Routing(
            joined(registered(), lease_s=1e9),
            index,
            self.clock,
            Policy(),
            seed=0,
            lease_s=1.0,
            decisions_max=1,
            recorders=[self.records.append],
        )
        self.store = RatesStore("" if directory is None else str(directory), self.routing)
        self.store.restore()

    @property
    def rates(self) -> tuple[LearntRates, ...]:
        return self.routing.state.learnt()

    def learn(self, slower: float) -> None:
        """A rank takes so many times as long as the reference engine, for 50 requests."""
        state_ = self.routing.state
        for number in range(50):
            verdict = state_.decide(route(decision_id=f"d{number}", sequence_hashes=b""), ask, 1.0, 1)
            state_.take(verdict)
            ttft_s, itl_s = state_.core.expected_s(verdict, 0)
            known = OutcomeKnown(
                now_s=1.0, decision_id=f"d{number}", outcome="ok", ttft_s=slower * ttft_s, itl_s=slower * itl_s,
                output_tokens=50, came_whole=False,
            )  # fmt: skip
            state_.apply(known)

    async def end(self) -> None:
        stop = asyncio.Event()
        stop.set()
        await self.store.run(stop)


def written(directory: Path) -> Any:
    return json.loads((directory / "rates.json").read_bytes())


async def test_a_router_goes_on_with_what_the_former_one_had_learnt_and_its_journal_has_it(tmp_path: Path) -> None:
    former = Life(tmp_path)
    former.learn(slower=2.0)
    await former.end()
    life = Life(tmp_path)
    assert life.rates == former.rates
    assert life.rates[0].prefill == pytest.approx(2.0, rel=0.02)
    again = workers()
    for record in (each for each in life.records if isinstance(each, RatesRestored)):
        again.apply(record)
    assert again.learnt() == former.rates != ()


async def test_it_is_written_while_the_router_runs(tmp_path: Path) -> None:
    life, stop = Life(tmp_path), asyncio.Event()
    task = asyncio.create_task(life.store.run(stop))
    life.learn(slower=2.0)
    async with asyncio.timeout(30):
        while not (tmp_path / "rates.json").exists():
            await life.clock.advance(WRITE_S)
        stop.set()
        await task
    assert written(tmp_path)["models"][0][0] == MODEL


async def test_a_write_that_a_stop_meets_ends_before_the_last_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life, stop = Life(tmp_path), asyncio.Event()
    disk, writes, may_end = threading.Lock(), threading.Semaphore(0), threading.Event()
    together = list[bool]()

    def slow_disk(_: int) -> None:
        together.append(disk.locked())
        with disk:
            writes.release()
            may_end.wait(30)

    monkeypatch.setattr(os, "fsync", slow_disk)
    task = asyncio.create_task(life.store.run(stop))
    life.learn(slower=2.0)
    await until(lambda: life.clock.sleepers > 0)
    await life.clock.advance(WRITE_S)
    await asyncio.to_thread(writes.acquire)
    life.learn(slower=3.0)
    stop.set()
    for _ in range(100):
        await asyncio.sleep(0)
    may_end.set()
    await task
    assert not any(together)
    assert written(tmp_path)["models"] == [list(msgspec.structs.astuple(each)) for each in life.rates]


async def test_nothing_new_is_not_written_again(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.learn(slower=2.0)
    await life.end()
    (tmp_path / "rates.json").unlink()
    await life.end()
    assert not (tmp_path / "rates.json").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"version": 2, "models": []}',
        json.dumps({"version": 1, "models": [["m", 65.0, 1.0, 100.0, 1]]}).encode(),
        json.dumps({"version": 1, "models": [["m", 0.0, 1.0, 100.0, 1]]}).encode(),
        json.dumps({"version": 1, "models": [["m", 1.0, 1.0, 2e6, 1]]}).encode(),
        b'{"version": 1, "models": [["m", NaN, 1.0, 100.0, 1]]}',
        json.dumps({"version": 1, "models": [["m", 1.0, 1.0, 100.0, 1]] * (MODELS_MAX + 1)}).encode(),
    ],
)
def test_a_file_that_cannot_be_used_is_reported_and_all_is_learnt_again(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "rates.json").write_bytes(data)
    with capture_logs() as logged:
        life = Life(tmp_path)
    assert life.rates == ()
    assert [line["event"] for line in logged] == ["rates_not_restored"]


async def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    life = Life(directory)
    life.learn(slower=2.0)
    with capture_logs() as logged:
        await life.end()
    assert [line["event"] for line in logged] == ["rates_not_written"]


async def test_without_a_directory_nothing_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    life = Life(None)
    life.learn(slower=2.0)
    await life.end()
    assert not (tmp_path / "rates.json").exists()


def test_what_is_learnt_already_is_not_replaced() -> None:
    life = Life(None)
    life.learn(slower=3.0)
    before = life.rates
    life.routing.apply(RatesRestored(now_s=0.0, models=(LEARNT,)))
    assert life.rates == before
