"""What all tests have: time limits of clean-ups, logs as they were, short searches, rare garbage collections, a broker.

pytest-timeout ends its watch where a test fails, before its fixtures are torn down. A clean-up that waits for ever
after a failure would hold the whole run.
"""

import gc
import logging
import signal
from collections.abc import Generator, Iterator

import pytest
import pytest_asyncio
import structlog
from hypothesis import HealthCheck, settings

from tests.support.amount import EVERY_DAY
from tests.system.integration.broker import Broker, lasting_broker

_TEARDOWN_S = 120.0
_AGAIN_S = 10.0

# How fast examples are made and run is the machine's affair: a busy one fails no test.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(EVERY_DAY, settings.get_profile("default"), max_examples=25)
settings.load_profile(EVERY_DAY)  # `--hypothesis-profile default` comes after it
gc.disable()  # until all tests are collected: their modules live as long as the process


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Let the collector go over what tests make, seldom, and never over what was imported."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)  # 700, 10, 10: a fifth of the tests' CPU
    gc.enable()


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


@pytest.fixture(scope="session")
def one_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """The broker of this process, which starts with the first test that has it."""
    with lasting_broker(tmp_path_factory.mktemp("log") / "store") as lasting:
        yield lasting


@pytest_asyncio.fixture
async def broker(one_broker: Broker) -> Broker:
    """A broker that runs and keeps nothing; the test may kill it."""
    await one_broker.renew()
    return one_broker
