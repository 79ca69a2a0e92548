"""`router replay`: every decision of a journal, taken again."""

import asyncio
import sys
from collections.abc import Mapping

import click

from kv_runtime.clock import SystemClock
from kv_runtime.event_log import EventLog
from router.commands.options import DIFFERENT, NothingRead, run_on_log, with_settings
from router.config import RouterSettings
from router.core.policies import Mode
from router.core.policy import Policy
from router.core.replay import Continuity, Redecided, Replay
from router.journal_reading import Told, read_journal
from router.policy_loader import load_modes

_SHOWN_MAX = 20


@click.command()
@with_settings
@click.option("--mode", help="another mode: whom would it have chosen?")
@click.option("--all", "show_all", is_flag=True, help=f"print every difference, not the first {_SHOWN_MAX} alone")
def replay(
    *, settings: RouterSettings, assignments: tuple[str, ...], router_name: str, mode: str | None, show_all: bool
) -> None:
    """Take every decision of the journal again, from the journal alone, and compare bit for bit.

    With --mode, or a policy's field (--set policy.temperature=0.2), it is also said whom that policy would have chosen
    in the same place; what was promised and answered stays as it was. The exit code is 0 when all that could be taken
    again is equal, 1 when something differs, 2 when there is no journal.

    \b
    Example:  router replay --nats-url nats://127.0.0.1:4222 --set policy.history_weight=1
    """  # noqa: D301
    is_other = mode is not None or any(each.startswith("policy.") for each in assignments)
    modes = load_modes(settings.policy.user_modes, settings.policy.mode)
    found = Replays(settings.policy.policy() if is_other else None, modes, None if show_all else _SHOWN_MAX)

    async def work(log: EventLog, stop: asyncio.Event) -> None:
        await read_journal(log, SystemClock(), router_name, found.take, stop)

    run_on_log(settings, work)
    if not found.routers:
        raise NothingRead(f"--router: found no journal of {router_name or 'anybody'} on the log")
    for line in found.summary():
        click.echo(line)
    sys.exit(DIFFERENT if found.different else 0)


class Replays:
    """The journals of some routers, each folded by itself."""

    def __init__(self, policy: Policy | None, modes: Mapping[str, Mode], shown_max: int | None) -> None:
        self._policy, self._modes, self._shown_max = policy, modes, shown_max
        self.routers: dict[str, tuple[Continuity, Replay]] = {}
        self.different = 0
        self._equal = self._inexact = self._compared = self._otherwise = 0

    def take(self, told: Told) -> None:
        """Fold the records of a message in; what differs is printed."""
        if told.router not in self.routers:
            self.routers[told.router] = Continuity(), Replay(policy=self._policy, modes=self._modes)
        continuity, replay_of_it = self.routers[told.router]
        for record in continuity.records(told.message):
            redecided = replay_of_it.take(record)
            if redecided is not None:
                self._count(told, redecided)

    def _count(self, told: Told, found: Redecided) -> None:
        if not found.is_exact:
            self._inexact += 1
            return
        self._equal += found.equal
        if not found.equal:
            self.different += 1
            if self._shown_max is None or self.different <= self._shown_max:
                click.echo(f"{told.router} {found.decision_id}: {found.difference}")
        if found.otherwise is not None and found.otherwise.rank is not None:
            self._compared += 1
            self._otherwise += found.otherwise.rank != found.recorded

    def summary(self) -> list[str]:
        """Return the lines that say how it went."""
        lines = [
            f"journals       {', '.join(sorted(self.routers))}",
            f"equal          {self._equal} decisions, bit for bit",
            f"different      {self.different}",
            f"not exact      {self._inexact}: records are missing before them, so nothing is said of them",
        ]
        if self._policy is not None:
            share = f" ({self._otherwise / self._compared:.1%})" if self._compared else ""
            lines.append(f"otherwise      {self._otherwise} of {self._compared} would have gone elsewhere{share}")
        return lines
