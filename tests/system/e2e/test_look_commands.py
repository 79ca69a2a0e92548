"""`indexer verify | tail | at | dump` as they are typed, on a real log and a live index."""

import asyncio
import base64
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from indexer.commands.http import index_app
from indexer.follow.checkpoint import encode_checkpoint
from indexer.service.history import time_text
from indexer.service.retention import SnapshotName
from kv_protocol import fleet, subjects
from kv_runtime.event_log import EventLog
from kv_runtime.telemetry import new_registry
from tests.support.forked import Ended
from tests.system.e2e.typed import begun, ended, typed
from tests.system.integration.broker import Broker
from tests.system.integration.index_on_log import Index, index_at, running_index
from tests.system.integration.scripted_rank import MODEL, ScriptedRank
from tests.system.integration.serving import serving
from tests.unit.router.samples import registered

UNREACHABLE_URL = "nats://127.0.0.1:1"
WALL_NS = 1_700_000_000_123_000_000
HELD = [(1, None, ["gpu"]), (2, 1, ["gpu"]), (3, 2, ["gpu"])]


async def indexer(*arguments: str | Path) -> Ended:
    return await typed("-m", "indexer", *arguments)


class Live(NamedTuple):
    """A live index with one rank, which holds the blocks 1, 2, 3."""

    url: str
    nats_url: str
    scripted: ScriptedRank
    following: Index

    async def verified(self, *arguments: str) -> Ended:
        command = ("verify", "--nats-url", self.nats_url, "--index-url", self.url, "--timeout-s", "1.5", *arguments)
        return await indexer(*command)


@asynccontextmanager
async def live(broker: Broker, log: EventLog, token: str = "") -> AsyncIterator[Live]:
    async with running_index(broker.url) as index:
        scripted = ScriptedRank(log)
        await scripted.start()
        await log.publish(subjects.fleet(MODEL, "w0"), fleet.encode(registered("w0", model=MODEL)))
        await scripted.store(1, 2, 3)
        await index.until_at(scripted)
        async with serving(index_app(index.index, new_registry(), token=token)) as api:
            yield Live(api.url, broker.url, scripted, index)


# ---------------------------------------------------------------- verify


async def test_verify_says_equal_and_ends_with_0(broker: Broker, log: EventLog) -> None:
    async with live(broker, log) as there:
        words, told = await asyncio.gather(there.verified(), there.verified("--json"))
    assert (words.code, told.code) == (0, 0), words.err + told.err
    assert words.out == "w0/0  equal  index at 1 of 00000007, mirror at 1, blocks: 3 gpu\n1 ranks: 1 equal\n"
    assert told.json["equal"] is True
    assert [(each["worker_id"], each["verdict"]) for each in told.json["ranks"]] == [("w0", "equal")]


async def test_verify_of_no_ranks_is_not_equal_and_ends_with_2(broker: Broker, log: EventLog) -> None:
    async with (
        running_index(broker.url) as index,
        serving(index_app(index.index, new_registry(), token="")) as api,
    ):
        there = Live(api.url, broker.url, ScriptedRank(log), index)
        words, told = await asyncio.gather(there.verified(), there.verified("--json"))
    assert (words.code, told.code, told.json["equal"]) == (2, 2, False), words.err + told.err
    assert words.out == "0 ranks: none known, nothing was compared\n"


async def test_verify_without_an_answer_ends_with_2_and_names_the_silent_party(broker: Broker, log: EventLog) -> None:
    async with live(broker, log, token="secret") as there:
        outcomes = await asyncio.gather(
            there.verified(),
            there.verified("--set", "control.token=secret"),
            there.verified("--nats-url", UNREACHABLE_URL),
            there.verified("--index-url", "http://127.0.0.1:1"),
            there.verified("--timeout-s", "0"),
        )
    assert [each.code for each in outcomes] == [2, 0, 2, 2, 2], [each.err for each in outcomes]
    wanted = [
        "allowed its control plane's, as control.token",
        "",
        UNREACHABLE_URL,
        "--index-url http://127.0.0.1:1",
        "0.1<=x",
    ]
    assert [words for words, each in zip(wanted, outcomes, strict=True) if words not in each.err] == []


# ---------------------------------------------------------------- at


async def test_at_shows_the_index_as_it_was_after_a_message(broker: Broker, log: EventLog) -> None:
    scripted = ScriptedRank(log)
    await scripted.store(1, 2, 3)
    await scripted.remove(3)
    await scripted.store(5, parent=2, silently=True)
    await scripted.store(6, parent=5)
    last = await log.message_from(subjects.EVENTS_STREAM, 3)
    assert last is not None
    common = ("at", "--nats-url", broker.url)
    first, words, told = await asyncio.gather(
        indexer(*common, "--seq", "1", "--json", "--overlap", "0x1,2,3,4", "--prefix", "2", "--prefix", "77"),
        indexer(*common, "--seq", "3", "--rank", "w0/0", "--overlap", "1", "--prefix", "2,3"),
        indexer(*common, "--time", "0", "--json"),
    )
    assert (first.code, words.code, told.code) == (0, 0, 0), first.err + words.err + told.err
    then = first.json
    assert (then["stream_seq"], then["snapshot"], then["messages_read"]) == (1, "", 1)
    assert then["overlap"] == [
        {"worker_id": "w0", "dp_rank": 0, "overlap_blocks": {"gpu": 3, "host": 3, "disk": 3, "external": 3}}
    ]
    assert [(each["sequence_hash"], len(each["holders"]), each["children"]) for each in then["prefixes"]] == [
        (2, 1, [3]),
        (77, 0, []),
    ]
    fold = await index_at(log, 3)
    state = fold.state(scripted.rank)
    assert state is not None
    assert words.out.splitlines() == [
        f"after message 3, of {time_text(last.time_ns)} (from the log alone)",
        f"w0/0  at 2 of 00000007, blocks: 2 gpu (digest {state.digests[0].digest})",
        "    note: behind seq 2 the log has a hole, or bytes that cannot be read",
        "overlap with 1 blocks, on each medium and those before it:",
        "    w0/0  1 gpu, 1 host, 1 disk, 1 external",
        "prefix 2: held by w0/0 (gpu); 0 blocks behind it",
        "prefix 3: held by no rank; 0 blocks behind it",
    ]
    assert told.json["stream_seq"] == 3


async def keep_snapshot(log: EventLog, seq: int) -> None:
    """The bucket has a snapshot of the log after this message."""
    fold = await index_at(log, seq)
    stream = await log.stream_state(subjects.EVENTS_STREAM)
    checkpoint = fold.checkpoint(stream.created, seq, WALL_NS)
    await log.objects(subjects.SNAPSHOT_BUCKET).put(f"{SnapshotName(seq, WALL_NS)}", encode_checkpoint(checkpoint))


# ---------------------------------------------------------------- dump


def names_in(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def blocks_of(lines: list[Any]) -> list[tuple[int, int | None, list[str]]]:
    return [(line["sequence_hash"], line["parent"], line["media"]) for line in lines]


async def test_dump_writes_what_the_live_index_holds_and_replaces_nothing(
    broker: Broker, log: EventLog, tmp_path: Path
) -> None:
    out = tmp_path / "blocks.jsonl"
    async with live(broker, log) as there:
        common = ("dump", "--index-url", there.url)
        to_terminal, columns, to_file, unknown = await asyncio.gather(
            indexer(*common),
            indexer(*common, "--rank", "w0/0", "--format", "columns"),
            indexer(*common, "--out", out),
            indexer(*common, "--rank", "w0/1"),
        )
        place, *blocks = to_terminal.lines
        assert (place["worker_id"], place["epoch"], place["seq"], place["blocks"]["gpu"]) == ("w0", 7, 1, 3)
        assert blocks_of(blocks) == HELD
        hashes = base64.b64decode(columns.lines[0]["chunks"][0]["hashes"])
        assert hashes == b"".join(block.to_bytes(8, "little") for block in (1, 2, 3))
        assert (to_file.code, to_file.out, out.read_text()) == (0, "", to_terminal.out)
        assert unknown.code == 2
        assert "--rank: found w0/1, allowed w0/0" in unknown.err
        await there.scripted.remove(3)
        await there.following.until_at(there.scripted)
        again, forced, nowhere = await asyncio.gather(
            indexer(*common, "--out", out, "--rank", "w0/0"),
            indexer(*common, "--out", tmp_path / "forced", "--force"),
            indexer(*common, "--out", tmp_path / "no" / "such" / "file"),
        )
        assert (again.code, out.read_text()) == (2, to_terminal.out)
        assert f"--out: found {out}, which is there; allowed a new file, or --force" in again.err
        assert (forced.code, blocks_of(list(map(json.loads, (tmp_path / "forced").read_text().splitlines()))[1:])) == (
            0,
            HELD[:2],
        )
        assert nowhere.code == 2
        assert "which cannot be written: No such file or directory" in nowhere.err
        assert (await indexer(*common, "--out", out, "--force")).code == 0
    assert len(out.read_text().splitlines()) == 3
    unreached = await indexer("dump", "--index-url", "http://127.0.0.1:1", "--out", out, "--force")
    assert (unreached.code, len(out.read_text().splitlines())) == (2, 3)
    assert names_in(tmp_path) >= {"blocks.jsonl", "forced"}
    assert not {name for name in names_in(tmp_path) if name.endswith(".part")}


async def test_dump_writes_what_a_snapshot_says(broker: Broker, log: EventLog) -> None:
    scripted = ScriptedRank(log)
    await scripted.store(1, 2, 3)
    await scripted.clear()
    common = ("dump", "--nats-url", broker.url, "--snapshot")
    none = await indexer(*common, "newest")
    assert (none.code, none.err) == (2, "indexer: snapshot: found newest, allowed none yet\n")
    for seq in (1, 2):
        await keep_snapshot(log, seq)
    name = f"{SnapshotName(1, WALL_NS)}"
    await log.objects(subjects.SNAPSHOT_BUCKET).put("damaged", b"damaged")
    first, newest, unknown, damaged = await asyncio.gather(
        indexer(*common, name), indexer(*common, "newest"), indexer(*common, "other"), indexer(*common, "damaged")
    )
    assert blocks_of(first.lines[1:]) == HELD
    assert [(line["seq"], line["blocks"]["gpu"]) for line in newest.lines] == [(2, 0)]
    assert (unknown.code, damaged.code) == (2, 2)
    assert f"snapshot: found other, allowed newest, {name}" in unknown.err
    assert "snapshot: found damaged, which cannot be read: malformed at byte 0" in damaged.err


# ---------------------------------------------------------------- tail


async def test_tail_ends_after_so_many_lines_or_by_a_signal(broker: Broker, log: EventLog) -> None:
    scripted = ScriptedRank(log)
    await scripted.store(1, 2, 3)
    await scripted.publish_raw(b"garbage")
    await scripted.remove(3)
    common = ("tail", "--nats-url", broker.url)
    words, told = await asyncio.gather(
        indexer(*common, "--all", "--limit", "3"),
        indexer(*common, "--from-seq", "2", "--limit", "2", "--json", "--rank", "w0/0", "--model", MODEL),
    )
    assert (words.code, told.code) == (0, 0), words.err + told.err
    assert [line.split(maxsplit=2)[1] for line in words.out.splitlines()] == ["1", "2", "3"]
    assert words.out.splitlines()[0].endswith(" 1 w0/0 00000007 1 stored gpu 3 blocks from 1")
    assert "unreadable, 7 bytes: malformed at byte" in words.out.splitlines()[1]
    assert [(line["line"], line["stream_seq"]) for line in told.lines] == [("unreadable", 2), ("events", 3)]
    following = await begun("-m", "indexer", *common, "--since", "3600")
    assert following.stdout is not None
    assert b" 1 w0/0 " in await following.stdout.readline()
    following.send_signal(signal.SIGTERM)
    assert (await ended(following)).code == 0
