"""A worker is killed in the midst of 200 streams: every one ends with the text that it has without that.

Reported: how much later a stream ended, and the longest pause between two of its events, of those that were moved.
"""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pytest

from kv_runtime.clock import SystemClock
from tests.system.faults.recoveries import Recoveries
from tests.system.faults.small_fleet import MODEL, Running, running

STREAMS = 200
TOKENS = 80
DONE = b"data: [DONE]\n\n"
_ROOMY = ("engine.total_kv_blocks=100000", "engine.max_num_seqs=512", "engine.speed=0.25")
"""A stream lasts some seconds, so that all of them are in their midst at one time."""
_PATIENT = ("failures.between_bytes_s=30", "failures.first_byte_s=30")


@dataclass
class Stream:
    """One stream as its client sees it; times are since the beginning of all."""

    number: int
    data: bytes = b""
    came_s: list[float] = field(default_factory=list)
    status: int = 0
    worker: str = ""

    @property
    def text(self) -> str:
        """All that was said; the stream has to have ended well, under one name, with one usage."""
        assert self.status == 200, self.data
        assert self.data.endswith(DONE), self.data[-300:]
        told = [json.loads(line[6:]) for line in self.data.split(b"\n") if line.startswith(b"data: {")]
        assert len({each["id"] for each in told}) == 1
        (usage,) = [each["usage"] for each in told if each.get("usage")]
        assert usage["completion_tokens"] == TOKENS
        return "".join(choice["text"] for each in told for choice in each["choices"])

    @property
    def pause_s(self) -> float:
        """The longest time between two pieces of it."""
        return max(after - before for before, after in zip(self.came_s, self.came_s[1:], strict=False))


async def ask(fleet: Running, stream: Stream, began_s: float, has_begun: asyncio.Event) -> None:
    """Read a stream to its end."""
    clock = SystemClock()
    body = {"model": MODEL, "max_tokens": TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    body["prompt"] = "each text begins like this, " * 8 + f"and goes on as number {stream.number}"
    async with fleet.session.post(f"{fleet.data_url}/v1/completions", json=body) as response:
        stream.status, stream.worker = response.status, response.headers.get("x-worker-instance-id", "")
        async for data in response.content.iter_any():
            stream.data += data
            stream.came_s.append(clock.now() - began_s)
            if stream.data.count(b"\n\n") > 2:
                has_begun.set()


async def streams_of(fleet: Running, victim: str | None) -> list[Stream]:
    """Return all streams, in whose midst the victim was killed."""
    streams = [Stream(number) for number in range(STREAMS)]
    begun = [asyncio.Event() for _ in streams]
    began_s = SystemClock().now()
    async with asyncio.TaskGroup() as group:
        for stream, has_begun in zip(streams, begun, strict=True):
            group.create_task(ask(fleet, stream, began_s, has_begun))
        for has_begun in begun:
            await has_begun.wait()
        if victim is not None:
            assert not all(stream.data.endswith(DONE) for stream in streams if stream.worker == victim)
            await fleet.workers[int(victim[1:])].kill()
    return streams


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "roles", [("aggregated",) * 4, ("prefill", "decode", "decode", "decode")], ids=["whole", "prefill and decode"]
)
async def test_every_stream_of_a_killed_worker_ends_as_without_it(
    tmp_path: Path, roles: tuple[str, ...], recoveries: Recoveries
) -> None:
    async with running(tmp_path, roles, _PATIENT, _ROOMY) as fleet:
        undisturbed = await streams_of(fleet, None)
        disturbed = await streams_of(fleet, "w3")
        moved = [each for each in disturbed if each.worker == "w3" and each.came_s]
        assert [each.text for each in disturbed] == [each.text for each in undisturbed]
        assert await fleet.total("request_turns_total") >= 1
        assert (await fleet.total("ledger_active_requests"), await fleet.total("inflight_requests")) == (0, 0)
    usual = {each.number: each.came_s[-1] for each in undisturbed}
    later_s = sorted(each.came_s[-1] - usual[each.number] for each in moved)
    pauses_s = sorted(each.pause_s for each in moved)
    usual_pause_s = median(each.pause_s for each in undisturbed)
    recoveries.tell(
        f"{', '.join(roles)}: {len(moved)} of {STREAMS} streams were moved; they ended {median(later_s):.2f} s later "
        f"(median), {later_s[-1]:.2f} s at most; longest pause {median(pauses_s):.2f} s "
        f"(median), {pauses_s[-1]:.2f} s at most, "
        f"undisturbed {usual_pause_s:.2f} s"
    )
