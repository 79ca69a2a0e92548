"""`router journal tail` prints journals record by record; `router replay` takes every decision in them again."""

import asyncio
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from math import inf

import click
import msgspec

from kv_protocol import subjects
from kv_protocol.decided import Decided, cost_unit
from kv_protocol.journal import FleetApplied, JournalBegan, JournalRecord, LedgerApplied, Lost, Refused
from kv_runtime.event_log import EventLog
from kv_runtime.process import PrintedLines, print_json, print_lines
from kv_runtime.supervise import until
from router.cli.options import DIFFERENT, NothingRead, moment, run_on_log, swept, with_settings
from router.config import RouterSettings
from router.decision.policies import Mode
from router.decision.policy import Policy
from router.decision.policy_config import load_modes
from router.decision.policy_store import fields_of, swapped
from router.journal.log import read_journal
from router.journal.replay import CheckpointRead, Found, JournalEntry, NotFolded, Redecided, Replay
from router.shadows.comparison import Tally, figures_table

_SHOWN_MAX = 20
_COUNTED = ("equal", "different", "not_exact", "not_folded", "checkpoints")
"""What a replay counts. `checkpoints` are those that are equal to the fold, or that began it."""
_NOT_SHOWN = (
    "now_s", "request", "best", "terms", "costs", "overlap", "event", "exclusions", "settings", "report",
    "data", "rows",
)  # fmt: skip


@click.group()
def journal() -> None:
    """Look into routers' journals."""


@journal.command()
@with_settings
@click.option("--all", "from_start", is_flag=True, help="begin with the oldest that is kept")
@click.option("--limit", type=click.IntRange(1), help="end after so many records")
@click.option("--json", "as_json", is_flag=True, help="print each record as a JSON object; bytes are base64")
def tail(
    *,
    settings: RouterSettings,
    router_name: str,
    from_start: bool,
    limit: int | None,
    as_json: bool,
    **_: object,
) -> None:
    """Follow the journal: records as routers applied them, from now on, or from the oldest that is kept.

    It ends with a signal, or after --limit records.

    \b
    Example:  router journal tail --nats-url nats://127.0.0.1:4222 --all --limit 50
    """  # noqa: D301
    done = asyncio.Event()
    printed = PrintedLines(done, limit, as_json=as_json)

    def show(entry: JournalEntry) -> None:
        for record in entry.message.records:
            printed.show(partial(as_line, entry, record), partial(as_object, entry, record))

    async def work(log: EventLog, stop: asyncio.Event) -> None:
        after_seq = 0 if from_start else (await log.stream_state(subjects.JOURNAL_STREAM)).last_seq
        await until(stop, read_journal(log, router_name, show, done, after_seq=after_seq, follow=True))

    run_on_log(settings, work)


def as_object(entry: JournalEntry, record: JournalRecord) -> bytes:
    """Return the record as JSON, with its kind and its place."""
    return msgspec.json.encode(
        {
            "time": _time(entry.time_ns),
            "router": entry.router,
            "life": entry.message.life,
            "seq": entry.stream_seq,
            "kind": record.__struct_config__.tag,
            "record": msgspec.structs.asdict(record),
        }
    )


def as_line(entry: JournalEntry, record: JournalRecord) -> str:
    """Return the record as a line for people."""
    kind = str(record.__struct_config__.tag)
    return f"{_time(entry.time_ns)} {entry.stream_seq:>8} {entry.router} {record.now_s:.3f} {kind:<8} {_text(record)}"


def _text(record: JournalRecord) -> str:
    match record:
        case Decided(request=request):
            margin = "" if record.margin is None else f", {record.margin:.1f} {cost_unit(record)} ahead"
            return (
                f"{request.decision_id}: {request.isl_tokens} tokens for {request.model} to {record.rank}, "
                f"{record.policy} by {record.reason}{margin}, of {record.ranks} ranks"
            )
        case Refused(request=request):
            reasons = (f"{each.worker_id}/{each.dp_rank} {each.reason}" for each in record.exclusions)
            return f"{request.decision_id}: {'; '.join(reasons)}"
        case FleetApplied(event=event):
            return f"{type(event).__name__} {event.worker_id} {event.instance}"
        case LedgerApplied(event=event, router=router):
            return f"{type(event).__name__} {_words(event, ('blocks',))}{f' of {router}' if router else ''}"
        case Lost():
            return f"{record.count} records that stood here were given up"
        case _:
            return _words(record, _NOT_SHOWN)


def _words(struct: msgspec.Struct, left_out: tuple[str, ...]) -> str:
    fields = msgspec.structs.asdict(struct).items()
    return " ".join(f"{name}={value}" for name, value in fields if name not in left_out and value not in ("", None, ()))


def _time(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@click.command()
@with_settings
@click.option("--mode", "policy__mode", help="another mode: which workers would it have chosen?")
@click.option("--sweep", metavar="KEY=A,B,...", help="other policies: this field of the policy with each of the values")
@click.option("--json", "as_json", is_flag=True, help="print the summary as one JSON object, and no lines")
@click.option("--all", "show_all", is_flag=True, help=f"print every difference and loss, not the first {_SHOWN_MAX}")
@click.option("--from-seq", type=click.IntRange(1), help="read from this message of the stream KV_JOURNAL on")
@click.option("--from", "from_ns", type=moment, metavar="ISO", help="read from this time on, as 2026-11-21T22:10:00Z")
def replay(
    *,
    settings: RouterSettings,
    assignments: tuple[str, ...],
    router_name: str,
    policy__mode: str | None,
    sweep: str | None,
    as_json: bool,
    show_all: bool,
    from_seq: int | None,
    from_ns: int | None,
    **_: object,
) -> None:
    """Take every decision of the journal again, from the journal alone, and compare bit for bit.

    A replay starts at the beginning of a router's life, or at any checkpoint. If the oldest
    records are gone, after lost records, and with --from, it starts at the next one. It prints where that is.

    With --mode, a policy's field (--set policy.temperature=0.2) or --sweep, the choices of those policies at the same
    moments are compared, too, with the figures of a shadow policy; promises and answers stay as recorded.

    The exit code is 0 if all repeated decisions are equal, 1 if one differs or a record cannot be folded, 2 if nothing
    was replayed: there is no journal, or no beginning and no checkpoint in the part that was read.

    \b
    Example:  router replay --nats-url nats://127.0.0.1:4222 --mode kv --sweep policy.ttft_weight=1,4,16
    """  # noqa: D301
    modes = load_modes(settings.policy.user_modes)
    named = [f"mode={policy__mode}"] if policy__mode else []
    named += [each for each in assignments if each.startswith("policy.")]
    base = settings.policy.policy()
    policies = {", ".join(named): base} if named else {}
    if sweep is not None:
        policies = {name: swapped(base, fields, modes, replace_all=False) for name, fields in swept(sweep).items()}
    found = Replays(policies, modes, inf if show_all else _SHOWN_MAX, (lambda _: None) if as_json else print_lines)

    after_seq = (from_seq or 1) - 1
    run_on_log(
        settings,
        lambda log, stop: read_journal(log, router_name, found.take, stop, after_seq=after_seq, from_ns=from_ns),
    )
    if not found.routers:
        raise NothingRead(_nothing_found(router_name, from_seq, from_ns))
    if as_json:
        print_json(msgspec.json.encode(found.as_object()))
    else:
        print_lines(*found.summary())
    if not found.has_started:
        raise NothingRead("nothing was replayed: what was read has no beginning of a router's life and no checkpoint")
    sys.exit(DIFFERENT if found.counts["different"] or found.counts["not_folded"] else 0)


def _nothing_found(router_name: str, from_seq: int | None, from_ns: int | None) -> str:
    named = {"--from-seq": from_seq, "--from": from_ns}
    options = " and ".join(name for name, value in named.items() if value is not None)
    router = router_name or "any router"
    if options:
        return f"{options}: nothing was replayed: the journal of {router} has no message there or later"
    return f"--router: found no journal of {router} on the log"


class Replays:
    """Folds each journal separately; `say` gets a line for each start, loss and difference."""

    def __init__(
        self,
        policies: Mapping[str, Policy],
        modes: Mapping[str, Mode],
        shown_max: float,
        say: Callable[[str], None],
    ) -> None:
        """`policies`: those to compare with the recorded decisions, by name.

        `say` gets at most `shown_max` differences, and as many losses.
        """
        self._shown_max, self._say = shown_max, say
        self._tallies = [Tally(name, fields_of(policy)) for name, policy in policies.items()]
        self.routers = defaultdict[str, _OneReplay](lambda: _OneReplay(policies=[*policies.values()], modes=modes))
        self.counts = Counter[str](dict.fromkeys(_COUNTED, 0))
        self._losses = 0

    def take(self, entry: JournalEntry) -> None:
        """Fold in the records of a message."""
        one = self.routers[entry.router]
        for record, found in one.read(entry.message):
            if news := one.news(record, found):
                self._losses += isinstance(record, Lost) or isinstance(found, NotFolded)
                if self._losses <= self._shown_max:
                    time = datetime.fromtimestamp(entry.time_ns / 1e9, UTC).isoformat(timespec="seconds")
                    self._say(f"{entry.router} {time} seq {entry.stream_seq}: {news}")
            match found:
                case Redecided(is_exact=False):
                    self.counts["not_exact"] += 1
                case Redecided(decision_id, difference, otherwise=otherwise):
                    self._compare("equal", difference and f"{decision_id}: {difference}", entry)
                    for tally, other in zip(self._tallies, otherwise, strict=False):  # a refusal has no other choices
                        tally.add(other)
                case CheckpointRead(is_compared, difference):
                    if is_compared or not difference:
                        self._compare("checkpoints", difference, entry)
                case NotFolded():
                    self.counts["not_folded"] += 1

    def _compare(self, kind: str, difference: str, entry: JournalEntry) -> None:
        self.counts["different" if difference else kind] += 1
        if difference and self.counts["different"] <= self._shown_max:
            self._say(f"{entry.router} {difference}")

    @property
    def has_started(self) -> bool:
        """Whether any journal was exact somewhere."""
        return any(one.has_started for one in self.routers.values())

    def summary(self) -> list[str]:
        """Return the summary lines."""
        counts = self.counts
        lines = [
            f"journals       {', '.join(sorted(self.routers))}",
            *(
                f"nowhere exact  {name}: {one.skipped} records, and no start"
                for name, one in sorted(self.routers.items())
                if not one.has_started
            ),
            f"equal          {counts['equal']} decisions, bit for bit",
            f"different      {counts['different']}",
            _explained(
                "not exact", counts["not_exact"], ": records are missing before them, so nothing is said of them"
            ),
            _explained("not folded", counts["not_folded"], " records: exactness ends at each of them"),
            f"checkpoints    {counts['checkpoints']}",
        ]
        if self._tallies:
            lines += ["", *figures_table([each.report() for each in self._tallies])]
        return lines

    def as_object(self) -> dict[str, object]:
        """Return the figures of the summary by name."""
        return {"journals": sorted(self.routers), **self.counts, "policies": [each.report() for each in self._tallies]}


def _explained(what: str, count: int, words: str) -> str:
    return f"{what:<14} {count}{words if count else ''}"


class _OneReplay(Replay):
    """One router's journal, as far as it was read."""

    has_started = _is_exact = False
    skipped = 0
    """Records since exactness was lost, or before the first start."""

    def news(self, record: JournalRecord, found: Found) -> str:
        """Return in words whether this record, just folded in, began or ended exactness; empty: neither."""
        was_exact, self._is_exact = self._is_exact, self.state is not None
        if isinstance(record, Lost):
            return f"{record.count} records are missing; not exact until the next start" * was_exact
        if self._is_exact and not was_exact:
            begins, skipped = "exact again" if self.has_started else "starts", self.skipped
            self.has_started, self.skipped = True, 0
            where = "the router's first record" if isinstance(record, JournalBegan) else "a checkpoint"
            return f"{begins} at {where}; {skipped} records before it skipped"
        self.skipped += not self._is_exact
        match found:
            case NotFolded(kind, reason):
                return f"{kind} record cannot be folded: {reason}; not exact until the next start"
            case CheckpointRead(is_compared=False, difference=difference) if difference:
                return f"no start: {difference}"
        return ""
