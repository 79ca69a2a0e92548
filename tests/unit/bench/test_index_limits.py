"""The machine's limits where there is no extension that measures them."""

from types import SimpleNamespace

import pytest

import bench.index.limits
from bench.index.limits import compare_ns, pointer_chase_ns, random_rmw_ns


@pytest.mark.parametrize("error", [ModuleNotFoundError, ImportError])
def test_an_extension_that_is_missing_or_damaged_leaves_limits_unknown(
    monkeypatch: pytest.MonkeyPatch, error: type[ImportError]
) -> None:
    def absent(name: str) -> object:
        raise error(name)

    monkeypatch.setattr(bench.index.limits, "import_module", absent)
    assert (random_rmw_ns(64, 1, 1), compare_ns(64), pointer_chase_ns(64, 1, 1)) == ({}, {}, {})


def test_of_an_index_that_takes_no_memory_no_limit_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    core = SimpleNamespace(random_rmw_ns=lambda *_: 1.0, compare_ns=lambda *_: 2.0, pointer_chase_ns=lambda *_: 3.0)
    monkeypatch.setattr(bench.index.limits, "import_module", lambda _: core)
    assert (random_rmw_ns(0, 1, 1), random_rmw_ns(64, 1, 1)) == ({}, {"limit": 1.0})
    assert (compare_ns(64), pointer_chase_ns(64, 1, 1)) == ({"limit": 2.0}, {"limit": 3.0})
