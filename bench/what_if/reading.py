"""Reads one router's journal for a simulation, and asks other policies at the recorded moments on the way."""

from collections.abc import Mapping
from typing import Any

from bench.what_if.recorded import JournalUnfit, Recorded
from kv_protocol.decided import Decided
from kv_protocol.journal import JournalRecord
from router.decision.policies import MODES
from router.decision.policy import Policy
from router.decision.policy_store import swapped
from router.journal.log import JournalEntry
from router.journal.replay import Continuity, Redecided, Replay
from router.shadows.comparison import Tally, of_verdicts


class JournalOfOne:
    """The journal of one router: its requests, and what other policies would have chosen at the same moments.

    `tallies` and `policies` have the others by name, once a decision was read.
    """

    def __init__(self, others: Mapping[str, Mapping[str, Any]], requests_max: int, *, asks: bool = False) -> None:
        """`others`: the fields in which each differs from the policy in force at the first request.

        `asks`: they are asked at the recorded moments.
        """
        self.recorded = Recorded(requests_max)
        self._others, self._asks = others, asks
        self.policies: dict[str, Policy] = {}
        self.tallies: dict[str, Tally] = {}
        self._asked: list[Policy] = []
        self._replay = Replay(policies=self._asked)  # which reads the list at each decision
        self._continuity = Continuity()
        self._router = ""

    def take(self, entry: JournalEntry) -> None:
        """Fold in the records of a message.

        Raises:
            JournalUnfit: it is another router's.
        """
        if self._router not in ("", entry.router):
            raise JournalUnfit(f"--router: found journals of {self._router} and {entry.router}, allowed one")
        self._router = entry.router
        for record in self._continuity.records(entry.message):
            self.fold(record)

    def fold(self, record: JournalRecord) -> None:
        """Fold in one record; raise `ConfigurationError` if a field of another policy is not allowed."""
        state = self._replay.state
        policy = None if state is None else state.policy
        if isinstance(record, Decided) and policy is not None and not self.policies:
            self._resolve(policy)
        found = self._replay.take(record)
        decided = found if isinstance(found, Redecided) else None
        self.recorded.take(record, decided, policy)
        if isinstance(record, Decided) and decided is not None and decided.verdict is not None:
            self._compare(decided)

    def _resolve(self, live: Policy) -> None:
        if live.mode not in MODES:
            raise JournalUnfit(
                f"policy.mode: found {live.mode}, allowed {', '.join(MODES)}: a simulation has no others"
            )
        for name, fields in self._others.items():
            policy = swapped(live, fields, MODES, replace_all=False)
            if policy != live:
                self.policies[name], self.tallies[name] = policy, Tally(name, dict(fields))
        self._asked += self.policies.values() if self._asks else ()

    def _compare(self, found: Redecided) -> None:
        state = self._replay.state
        assert state is not None, "a decision was taken again in it"
        assert found.verdict is not None
        for tally, other in zip(self.tallies.values(), found.otherwise, strict=self._asks):
            if other.verdict is None:
                tally.skipped["unreadable" if "reads overlap" in other.reason else "no_choice"] += 1
            else:
                tally.add(of_verdicts(state, found.verdict, other.verdict))
