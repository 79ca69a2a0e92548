"""Rules of TensorRT-LLM's events, of one rank."""

from collections.abc import Iterator

import pytest

from tests.unit.worker_agent.trtllm_json import BLOCK_SIZE
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.metrics import ENGINE_EVENT_KINDS, PUBLISHER_COUNTS


@pytest.fixture
def rules() -> Iterator[TrtllmRules]:
    """Rules whose counts are all metrics, whatever a test makes them count."""
    rules = TrtllmRules(BLOCK_SIZE)
    yield rules
    assert set(rules.counts) <= {*ENGINE_EVENT_KINDS, *PUBLISHER_COUNTS}
