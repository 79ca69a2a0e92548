"""Which index serves is what configuration says; without the extension, `auto` is the one in Python, and says so."""

import sys
from typing import Literal

import pytest
from structlog.testing import capture_logs

from indexer.core.prefix_index import PrefixIndex
from indexer.core.reference import ReferenceIndex
from indexer.implementations import make_index
from indexer.native import load
from kv_protocol.events import Tier
from kv_runtime.config import ConfigurationError, IndexSection

BUILT = hasattr(load(), "Tree")


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody find the extension."""
    monkeypatch.delitem(sys.modules, "indexer.native.index", raising=False)
    monkeypatch.setitem(sys.modules, "indexer.native._core", None)


def holds(index: PrefixIndex) -> bool:
    index.register(0)
    index.store(0, None, (1, 2), Tier.GPU, 0.0)
    return index.overlaps((1, 2, 3)) == {0: (2, 2, 2, 2)}


def test_python_is_the_reference_index_and_says_nothing() -> None:
    with capture_logs() as lines:
        name, index = make_index(IndexSection(implementation="python"))
    assert (name, type(index), lines) == ("python", ReferenceIndex, [])
    assert holds(index)


def test_by_default_it_is_the_native_one_where_that_was_built() -> None:
    with capture_logs() as lines:
        name, index = make_index(IndexSection())
    assert (name, len(lines)) == (("native", 0) if BUILT else ("python", 1))
    assert holds(index)


@pytest.mark.usefixtures("unbuilt")
def test_auto_without_the_extension_is_python_and_one_warning_that_says_why() -> None:
    with capture_logs() as lines:
        name, index = make_index(IndexSection())
    assert (name, type(index)) == ("python", ReferenceIndex)
    assert [(line["event"], line["log_level"]) for line in lines] == [("native_index_missing", "warning")]
    assert "indexer.native._core" in lines[0]["reason"]
    assert "pip install" in lines[0]["hint"]


@pytest.mark.usefixtures("unbuilt")
def test_native_without_the_extension_is_an_error_of_configuration_that_says_what_to_do() -> None:
    with pytest.raises(
        ConfigurationError, match=r"index\.implementation: found native, which cannot be loaded"
    ) as found:
        make_index(IndexSection(implementation="native"))
    assert "pip install" in found.value.problems[0]


@pytest.mark.parametrize("implementation", ["python", *(["native"] if BUILT else [])])
def test_the_limits_are_those_of_configuration(implementation: Literal["python", "native"]) -> None:
    settings = IndexSection(
        implementation=implementation, memory_bytes_max=1 << 20, parked_blocks_max=1, parked_ttl_s=3
    )
    _, index = make_index(settings)
    index.register(0)
    index.store(0, 7, (1, 2), Tier.GPU, 0.0)
    assert index.statistics().parked_blocks == 1
    assert index.expire(2.9) == {0}, "one block too many"
    assert index.expire(3.0) == {0}
    index.store(0, None, range(100, 200_000), Tier.GPU, 4.0)
    assert index.overfull() == {0}
    assert index.statistics().memory_bytes <= 1 << 20
