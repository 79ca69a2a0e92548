"""Which index serves is what configuration says; without the extension, `auto` is the one in Python, and says so."""

import runpy
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
from structlog.testing import capture_logs

from indexer.index.implementations import make_index
from indexer.index.prefix_index import PrefixIndex
from indexer.index.reference import ReferenceIndex
from indexer.native import load
from indexer.native.block_hashes import hash_blocks
from kv_protocol.codec import pack_u64
from kv_protocol.events import Tier
from kv_protocol.hashing import chain, local_block_hashes
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.config.sections import IndexSection

BUILT = hasattr(load(), "Tree")
CORE = "indexer.native._core"


class Damage:
    """Finds the extension in a file that is none."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the file for the extension, and nothing for others."""
        del path, target
        return spec_from_file_location(name, self._file) if name == CORE else None


@pytest.fixture(params=["missing", "damaged"])
def unbuilt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Make the extension missing, or one that cannot be loaded."""
    monkeypatch.delitem(sys.modules, "indexer.native.index", raising=False)
    if request.param == "missing":
        monkeypatch.setitem(sys.modules, CORE, None)  # which says: not to be found
    else:
        monkeypatch.delitem(sys.modules, CORE, raising=False)
        (tmp_path / "_core.so").write_bytes(b"\x7fELF, and no more")
        monkeypatch.setattr(sys, "meta_path", [Damage(tmp_path / "_core.so"), *sys.meta_path])
    load.cache_clear()
    yield
    load.cache_clear()


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
    assert "_core" in lines[0]["reason"]
    assert "pip install" in lines[0]["hint"]


@pytest.mark.usefixtures("unbuilt")
def test_native_without_the_extension_is_an_error_of_configuration_that_says_what_to_do() -> None:
    with pytest.raises(
        ConfigurationError, match=r"index\.implementation: found native, which cannot be loaded"
    ) as found:
        make_index(IndexSection(implementation="native"))
    assert "pip install" in found.value.problems[0]


@pytest.mark.usefixtures("unbuilt")
def test_without_the_extension_blocks_are_hashed_all_the_same() -> None:
    assert load() is None
    assert hash_blocks([1, 2, 3, 4], 2) == pack_u64(chain(local_block_hashes([1, 2, 3, 4], 2)))


@pytest.mark.usefixtures("unbuilt")
def test_without_the_extension_its_command_says_why_and_fails() -> None:
    with pytest.raises(SystemExit, match=r"not there(.|\n)*_core") as found:
        runpy.run_module("indexer.native.__main__", run_name="__main__")
    assert isinstance(found.value.code, str), "which is status 1"


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
