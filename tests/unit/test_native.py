"""The extension is built, and serves."""

import importlib
import subprocess
import sys

import pytest

from indexer.native import extension, load
from indexer.native.index import NativeIndex
from kv_protocol.events import Tier
from router import native as router_native


def test_it_is_there() -> None:
    assert load() is extension()


def test_its_index_serves() -> None:
    index = NativeIndex()
    index.register(3)
    index.store(3, None, (1, 2), Tier.GPU, 0.0)
    assert index.overlaps((1, 2, 9)) == {3: (2, 2, 2, 2)}


def test_the_router_ends_with_one_sentence_that_says_what_to_install_where_its_extension_is_missing() -> None:
    hidden = "import sys; sys.modules['router.native._fold'] = None; import router.__main__"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("router: the router's C++ extension is missing: pip install 'kv-router[router]'")


def test_the_router_refuses_an_extension_of_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_native.built, "INTERFACE", router_native.INTERFACE + 1)
    with pytest.raises(ImportError, match=r"of another version: pip install 'kv-router\[router\]'"):
        importlib.reload(router_native)
