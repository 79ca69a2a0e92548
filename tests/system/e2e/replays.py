"""`router replay` as it is typed, and the figures of its report."""

import re

from tests.system.e2e.typed import typed


async def replayed(nats_url: str) -> str:
    """Return the report on the only journal of the event log."""
    return (await typed("-m", "router", "replay", "--nats-url", nats_url)).out


def figure(name: str, report: str) -> int:
    """Return the number behind a name of the report."""
    found = re.search(rf"^{name} +(\d+)", report, re.MULTILINE)
    assert found is not None, report
    return int(found[1])
