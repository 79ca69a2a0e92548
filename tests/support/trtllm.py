"""The fake TensorRT-LLM, for one test: `tensorrt_llm` can be imported while it lasts, and leaves nothing behind.

    before   modules of that name that were imported earlier are set aside; the fake's directory comes first on the path
    during   `fake.control` asks for faults; `environment()` gives a child process the same package
    after    engines are shut down; the path, the environment, loggers and modules are as they were. Modules that hold
             anything of the fake, because they were imported meanwhile, are forgotten, too, so that the next import of
             them finds what is there then

A test takes the fixture by name; its conftest imports it: `from tests.support.trtllm import trtllm`.
"""

import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.tensorrt_llm_fake.tensorrt_llm._fake.control import Control

FAKE_PATH = Path(__file__).parent / "tensorrt_llm_fake"
NAMES = ("tensorrt_llm", "tensorrt_llm_fake_control", "PIL", "torch")
"""The package, and what comes with it."""
LOGGER = "TRT-LLM"
THREAD = "fake-tensorrt-llm"
_ENDS_WITHIN_S = 10.0
"""For the thread of an engine that the garbage collector ended."""


class Fake:
    """The imported fake: `module` is `tensorrt_llm`, `llmapi` its LLM API."""

    def __init__(self, module: ModuleType, control: "Control") -> None:
        self.module: Any = module
        self.llmapi: Any = importlib.import_module("tensorrt_llm.llmapi")
        self.control = control

    def submodule(self, name: str) -> Any:
        """Return a submodule by its name below `tensorrt_llm`."""
        return importlib.import_module(f"tensorrt_llm.{name}")


@contextmanager
def installed() -> Iterator[Fake]:
    """Be where `tensorrt_llm` is the fake."""
    path, modules, environ = list(sys.path), dict(sys.modules), dict(os.environ)
    for name in _named(sys.modules):
        del sys.modules[name]
    sys.path.insert(0, str(FAKE_PATH))
    importlib.invalidate_caches()
    try:
        control = importlib.import_module("tensorrt_llm_fake_control").control
        control.reset()
        yield Fake(importlib.import_module("tensorrt_llm"), control)
        control.release()
        control.finish_start()
        for executor in control.executors:
            executor.shutdown()
    finally:
        _forget(modules)
        sys.path[:] = path
        for key in [key for key in sys.path_importer_cache if key.startswith(str(FAKE_PATH))]:
            del sys.path_importer_cache[key]
        os.environ.clear()
        os.environ.update(environ)
        logging.Logger.manager.loggerDict.pop(LOGGER, None)


@pytest.fixture
def trtllm() -> Iterator[Fake]:
    """Give a test the fake; fail it where a thread of an engine is left."""
    with installed() as fake:
        yield fake
    threads = [each for each in threading.enumerate() if each.name == THREAD]
    for each in threads:
        each.join(_ENDS_WITHIN_S)
    assert not [each.name for each in threads if each.is_alive()]


def environment(**told: Any) -> dict[str, str]:
    """Return the variables that give a child process the fake; `told` as `TENSORRT_LLM_FAKE` has it."""
    import json  # noqa: PLC0415  children are rare

    paths = [str(FAKE_PATH), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "TENSORRT_LLM_FAKE": json.dumps(told)}


def _named(modules: dict[str, ModuleType]) -> list[str]:
    return [name for name in modules if name.split(".")[0] in NAMES]


def _forget(before: dict[str, ModuleType]) -> None:
    for name, module in list(sys.modules.items()):
        if name not in before and (name.split(".")[0] in NAMES or _holds_fake(module)):
            del sys.modules[name]
    for name in _named(sys.modules):
        del sys.modules[name]
    for name in _named(before):
        sys.modules[name] = before[name]


def _holds_fake(module: ModuleType) -> bool:
    return any(_home(each).split(".")[0] in NAMES for each in list(vars(module).values()))


def _home(value: Any) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(type(value), "__module__", None)
    own = getattr(value, "__module__", None)
    return str(own if isinstance(own, str) else name)
