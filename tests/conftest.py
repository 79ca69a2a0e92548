"""What all tests have: a time limit of their clean-up, and logs as they were.

pytest-timeout ends its watch where a test fails, before its fixtures are torn down. A clean-up that waits for ever
after a failure would hold the whole run.
"""

import logging
import signal
from collections.abc import Generator, Iterator

import pytest
import structlog

_TEARDOWN_S = 120.0
_AGAIN_S = 10.0


def _overdue(_number: int, _frame: object) -> None:
    pytest.fail(f"the clean-up took more than {_TEARDOWN_S:g} s")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """Fail a clean-up that takes too long, again and again until it ends: each signal breaks off one wait."""
    before = signal.signal(signal.SIGALRM, _overdue)
    signal.setitimer(signal.ITIMER_REAL, _TEARDOWN_S, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Undo what a command that a test called in this process set: later tests read the log at every level."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        root.handlers, root.level = handlers, level
