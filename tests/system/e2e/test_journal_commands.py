"""`router replay` and `router journal tail` as they are typed, on a real log."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from kv_protocol import subjects
from kv_protocol.journal import PolicyChanged, TimePassed
from kv_runtime.clock import Clock
from kv_runtime.config.sections import NatsSection
from kv_runtime.event_log import EventLog
from kv_runtime.supervise import Part
from router.decision.state import RouterState
from router.journal.encoder import JournalCheckpoint, JournalEncoder
from router.journal.log import JournalWriter, ensure_journal
from tests.support.manual_clock import ManualClock
from tests.support.parts import at_work
from tests.support.watched_routing import Told, Watcher, tell
from tests.system.e2e.typed import figure, typed
from tests.system.integration.broker import Broker, eventually
from tests.system.integration.test_journal import SETTINGS, written
from tests.unit.properties import router_life
from tests.unit.properties.router_life import POLICIES, Life

UNREACHABLE_URL = "nats://127.0.0.1:1"
_REPLAY = "from router.cli.journals import replay; replay(prog_name='router replay')"
_TAIL = "from router.cli.journals import tail; tail(prog_name='router journal tail')"


class Journal:
    """Keeps the journal of a router that has another one, too."""

    def __init__(self, encoder: JournalEncoder) -> None:
        self._encoder = encoder

    def record(self, what: Told) -> None:
        """Keep it."""
        tell(self._encoder, what)


async def lived(seed: int = 1, policy: str = "kv") -> list[Told | JournalCheckpoint]:
    life = Life(seed, POLICIES[policy])
    await life.run()
    return life.shelf.told


async def write(log: EventLog, told: list[Told | JournalCheckpoint], router: str = "router-1") -> None:
    async with written(log, router=router) as writer:
        for what in told:
            tell(writer.encoder, what)
        await eventually(lambda: not writer.waiting())


async def test_a_journal_replays_and_says_what_another_policy_would_have_done(broker: Broker, log: EventLog) -> None:
    await write(log, await lived())
    same = await typed("-c", _REPLAY, "--nats-url", broker.url)
    assert (same.code, same.err) == (0, "")
    assert re.search(r"^journals +router-1$", same.out, re.MULTILINE)
    assert re.search(r"^equal +[1-9]\d+ decisions, bit for bit$", same.out, re.MULTILINE)
    assert re.search(r"^different +0$", same.out, re.MULTILINE)
    assert "TTFT gain" not in same.out
    other = await typed("-c", _REPLAY, "--nats-url", broker.url, "--mode", "random")
    assert other.code == 0
    assert re.search(r"^mode=random +[1-9]\d*\.\d% ", other.out, re.MULTILINE)
    weighed = await typed("-c", _REPLAY, "--nats-url", broker.url, "--set", "policy.ttft_weight=9")
    assert re.search(r"^policy.ttft_weight=9 +\d+\.\d% ", weighed.out, re.MULTILINE)


async def test_a_sweep_compares_a_policy_for_each_of_its_values(broker: Broker, log: EventLog) -> None:
    await write(log, await lived())
    swept = ("--nats-url", broker.url, "--mode", "kv", "--sweep", "policy.overlap_credit=0,1")
    report = json.loads((await typed("-c", _REPLAY, *swept, "--json")).out)
    assert [each["name"] for each in report["policies"]] == ["overlap_credit=0", "overlap_credit=1"]
    assert report["different"] == 0
    without, full = (each["cached_blocks_gain"]["mean"] for each in report["policies"])
    assert without < full
    for sweep, words in {
        "overlap_credit": "--sweep: found 'overlap_credit', allowed a policy's field and values",
        "overlap_credit=1,": "--sweep: found 'overlap_credit=1,', allowed a policy's field and values",
        "nonsense=1": "nonsense",
        "overlap_credit=much": 'overlap_credit: found "much"',
    }.items():
        refused = await typed("-c", _REPLAY, "--nats-url", broker.url, "--sweep", sweep)
        assert (refused.code, refused.out) == (2, "")
        assert words in refused.err


async def test_a_journal_that_lacks_what_was_applied_ends_with_1_and_says_what_differs(
    broker: Broker, log: EventLog
) -> None:
    told = [what for what in await lived() if type(what).__name__ != "LedgerApplied"]
    await write(log, told)
    found = await typed("-c", _REPLAY, "--nats-url", broker.url, "--router", "router-1")
    assert found.code == 1
    assert re.search(r"^router-1 d\d+\+*: .*now .*, recorded ", found.out, re.MULTILINE)


@asynccontextmanager
async def living(log: EventLog, **bounds: int) -> AsyncIterator[tuple[Life, JournalWriter]]:
    """Yield a life and the writer of its journal, at work."""
    await ensure_journal(log, SETTINGS, NatsSection())
    writers = list[JournalWriter]()

    def journal_of(clock: ManualClock, state: RouterState) -> Watcher:
        made_of = router_life.SETTINGS
        writers.append(
            JournalWriter(
                log, clock, SETTINGS, router="router-1", made_of=made_of, state=state, kv_seq=lambda: 1, **bounds
            )
        )
        return Journal(writers[0].encoder)

    life = Life(1, POLICIES["kv"], journal_of)
    life.begin()
    async with at_work(Part("journal", writers[0].run), Part("event-log", log.run, 1)):
        yield life, writers[0]
        await eventually(lambda: not writers[0].waiting())


async def test_a_journal_without_its_head_is_replayed_from_the_first_checkpoint_that_is_left(
    broker: Broker, log: EventLog
) -> None:
    async with living(log, checkpoint_records=100) as (life, writer):
        for _ in range(40):
            await life.go_on(10)
            await eventually(lambda: not writer.waiting())
        assert writer.encoder.checkpoints_total >= 3
        whole = await typed("-c", _REPLAY, "--nats-url", broker.url)
        state = await log.stream_state(subjects.JOURNAL_STREAM)
        middle = await typed("-c", _REPLAY, "--nats-url", broker.url, "--from-seq", str(state.last_seq // 2))
        now = datetime.now(UTC).isoformat()
        await log.purge(subjects.JOURNAL_STREAM, state.first_seq + 2)
        purged = await typed("-c", _REPLAY, "--nats-url", broker.url)
        late = await typed("-c", _REPLAY, "--nats-url", broker.url, "--from", now)
    assert (whole.code, figure("different", whole.out), figure("not exact", whole.out)) == (0, 0, 0)
    assert figure("checkpoints", whole.out) == writer.encoder.checkpoints_total
    start = r"^router-1 \S+ seq 1: starts at the router's first record; 0 records before it skipped$"
    assert re.search(start, whole.out, re.MULTILINE)
    for report in (purged, middle):
        assert (report.code, figure("different", report.out)) == (0, 0)
        assert 0 < figure("equal", report.out) < figure("equal", whole.out)
        assert figure("equal", report.out) + figure("not exact", report.out) <= figure("equal", whole.out)
        assert re.search(r"seq \d+: starts at a checkpoint; [1-9]\d* records before it", report.out)
    assert (late.code, "--from: nothing was replayed" in late.err) == (2, True)


async def test_what_cannot_be_done_ends_with_2_and_a_line_that_says_why(broker: Broker, log: EventLog) -> None:
    assert (await typed("-c", _REPLAY, "--nats-url", UNREACHABLE_URL)).code == 2
    without = await typed("-c", _REPLAY)
    assert (without.code, "nats.url: found none" in without.err) == (2, True)
    nothing = await typed("-c", _REPLAY, "--nats-url", broker.url)
    assert nothing.code == 2
    await write(log, [])
    unknown = await typed("-c", _REPLAY, "--nats-url", broker.url, "--router", "unknown")
    assert (unknown.code, unknown.err) == (2, "router: --router: found no journal of unknown on the log\n")


async def test_the_tail_shows_every_kind_of_record_as_a_line_or_as_an_object(broker: Broker, log: EventLog) -> None:
    await write(log, await lived())
    lines = await typed("-c", _TAIL, "--nats-url", broker.url, "--all", "--limit", "400")
    assert (lines.code, len(lines.out.splitlines())) == (0, 400)
    assert re.search(r" decided +d\d+: \d+ tokens for [mn] to w\d/[01], kv by \w+", lines.out)
    objects = await typed("-c", _TAIL, "--nats-url", broker.url, "--all", "--limit", "400", "--json")
    found = [json.loads(line) for line in objects.out.splitlines()]
    assert len(found) == 400
    assert {each["kind"] for each in found} >= {"began", "policy", "fleet", "heard", "decided", "outcome", "tick"}
    assert {each["router"] for each in found} == {"router-1"}


async def test_a_record_that_cannot_be_folded_is_named_and_replay_goes_on_at_the_next_checkpoint(
    broker: Broker, log: EventLog
) -> None:
    told = await lived()
    middle = len(told) // 2
    planted = PolicyChanged(now_s=1.0, policy={"temperature": "hot"})
    await write(log, [*told[:middle], planted, *told[middle:]])
    found = await typed("-c", _REPLAY, "--nats-url", broker.url)
    assert (found.code, figure("different", found.out), figure("not folded", found.out)) == (1, 0, 1)
    assert figure("equal", found.out) > 0 < figure("not exact", found.out)
    assert re.search(
        r"^router-1 \S+ seq \d+: policy record cannot be folded: ValidationError: .*; not exact until the next start$",
        found.out,
        re.MULTILINE,
    )


async def test_of_messages_that_cannot_be_read_the_first_is_named_and_the_others_are_counted(
    broker: Broker, log: EventLog
) -> None:
    async with written(log):
        for _ in range(20):
            await log.publish(subjects.journal("router-1"), b"nonsense")
    replayed = await typed("-c", _REPLAY, "--nats-url", broker.url)
    assert replayed.err.count("message_refused") == 1
    assert re.search(r"messages.{1,3}20\b.*journal_messages_refused|journal_messages_refused.*20\b", replayed.err)
    assert len(replayed.err.splitlines()) == 2
    tail = await typed("-c", _TAIL, "--nats-url", broker.url, "--all", "--limit", "1")
    assert tail.code == 0
    assert tail.err.count("message_refused") <= 1


async def test_a_replay_from_the_future_says_that_nothing_is_there_also_while_a_router_writes(
    broker: Broker, log: EventLog
) -> None:
    async with written(log) as writer:
        ends = asyncio.Event()

        async def beat() -> None:
            while not ends.is_set():
                writer.encoder.record(TimePassed(now_s=1.0))
                await Clock().sleep(0.02)

        beating = asyncio.ensure_future(beat())
        await eventually(lambda: writer.messages_total > 2)
        for options in (("--from", "2099-01-01T00:00:00Z"), ("--from-seq", "4000000000")):
            found = await typed("-c", _REPLAY, "--nats-url", broker.url, *options)
            words = (
                f"router: {options[0]}: nothing was replayed: the journal of any router has no message there or later"
            )
            assert (found.code, found.out, found.err) == (2, "", f"{words}\n")
        last = (await log.stream_state(subjects.JOURNAL_STREAM)).last_seq
        without_start = await typed("-c", _REPLAY, "--nats-url", broker.url, "--from-seq", str(last))
        assert (without_start.code, figure("equal", without_start.out)) == (2, 0)
        assert "nothing was replayed: what was read has no beginning" in without_start.err
        ends.set()
        await beating
