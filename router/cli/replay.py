"""`router replay`: takes every decision of a journal again."""

import asyncio
import sys
from collections.abc import Mapping

import click
import msgspec

from kv_runtime.clock import SystemClock
from kv_runtime.event_log import EventLog
from kv_runtime.process import print_json, print_lines
from router.cli.options import DIFFERENT, NothingRead, moment, run_on_log, swept, with_settings
from router.cli.replays import Replays
from router.config import RouterSettings
from router.decision.policies import Mode
from router.decision.policy import Policy
from router.decision.policy_loader import load_modes
from router.decision.policy_swap import swapped
from router.journal.reader import read_journal

_SHOWN_MAX = 20


@click.command()
@with_settings
@click.option("--mode", help="another mode: which workers would it have chosen?")
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
    mode: str | None,
    sweep: str | None,
    as_json: bool,
    show_all: bool,
    from_seq: int | None,
    from_ns: int | None,
) -> None:
    """Take every decision of the journal again, from the journal alone, and compare bit for bit.

    A replay starts at the beginning of a router's life, or at any checkpoint. If the oldest
    records are gone, after lost records, and with --from, it starts at the next one. It prints where that is.

    With --mode, a policy's field (--set policy.temperature=0.2) or --sweep, the choices of those policies at the same
    moments are compared, too: how many differ, predicted hit rate, imbalance, cost; promises and answers stay as
    recorded. The exit code is 0 if all repeated decisions are equal, 1 if
    one differs or a record cannot be folded, 2 if nothing was replayed: there is no journal, or no beginning and no
    checkpoint in the part that was read.

    \b
    Example:  router replay --nats-url nats://127.0.0.1:4222 --mode kv --sweep policy.ttft_weight=1,4,16
    """  # noqa: D301
    modes = load_modes(settings.policy.user_modes, settings.policy.mode)
    named = [
        each for each in (f"mode={mode}" * (mode is not None), *assignments) if each.startswith(("mode=", "policy."))
    ]
    policies = _policies(settings.policy.policy(), ", ".join(named), sweep, modes)
    found = Replays(policies, modes, None if show_all else _SHOWN_MAX, _silent if as_json else print_lines)

    async def work(log: EventLog, stop: asyncio.Event) -> None:
        after_seq = (from_seq or 1) - 1
        await read_journal(log, SystemClock(), router_name, found.take, stop, after_seq=after_seq, from_ns=from_ns)

    run_on_log(settings, work)
    if not found.routers:
        raise NothingRead(_nothing_found(router_name, from_seq, from_ns))
    if as_json:
        print_json(msgspec.json.encode(found.as_object()))
    else:
        print_lines(*found.summary())
    if not found.has_started:
        raise NothingRead("nothing was replayed: what was read has no beginning of a router's life and no checkpoint")
    sys.exit(DIFFERENT if found.different or found.not_folded else 0)


def _policies(base: Policy, name: str, sweep: str | None, modes: Mapping[str, Mode]) -> dict[str, Policy]:
    """Return the policies to compare, by name: the named one, if any, and one for each value of the sweep."""
    policies = {name: base} if name and sweep is None else {}
    if sweep is None:
        return policies
    for swept_name, fields in swept(sweep).items():
        policies[swept_name] = swapped(base, fields, modes, replace_all=False)
    return policies


def _silent(_: str) -> None:
    """Print nothing."""


def _nothing_found(router_name: str, from_seq: int | None, from_ns: int | None) -> str:
    named = {"--from-seq": from_seq, "--from": from_ns}
    options = " and ".join(name for name, value in named.items() if value is not None)
    router = router_name or "any router"
    if options:
        return f"{options}: nothing was replayed: the journal of {router} has no message there or later"
    return f"--router: found no journal of {router} on the log"
