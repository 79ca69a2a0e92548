"""A whole journal of one router at once: its records in order, and its decisions, taken again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kv_protocol.journal import JournalMessage, JournalRecord
from router.decision.policies import MODES, Mode
from router.decision.policy import Policy
from router.journal.replay import Continuity, Redecided, Replay


def continuous(messages: Iterable[JournalMessage]) -> Iterator[JournalRecord]:
    """Yield the records of the messages in their order, each once, with `Lost` where some are missing."""
    continuity = Continuity()
    for message in messages:
        yield from continuity.records(message)


def replay(
    records: Iterable[JournalRecord], *, policies: Sequence[Policy] = (), modes: Mapping[str, Mode] = MODES
) -> Iterator[Redecided]:
    """Yield every decision, taken again; with `policies`, also the choice of each."""
    again = Replay(policies=policies, modes=modes)
    for record in records:
        found = again.take(record)
        if isinstance(found, Redecided):
            yield found
