"""The KV event classes of engines' releases, and xgrammar, from their wheels, without their dependencies.

`python -m tests.support.engine_wheels` downloads the wheels and keeps the few files that are read (`build/engines`).
Every other module of an engine is a stand-in: the event classes need their names alone.
"""

import dataclasses
import logging
import subprocess
import sys
import sysconfig
import zipfile
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest import mock

from tests.support.paths import ROOT

DIRECTORY = ROOT / "build" / "engines"
VLLM = ("vllm/config/kv_events.py", "vllm/distributed/kv_events.py")
SGLANG = (
    "sglang/srt/disaggregation/kv_events.py",
    "sglang/srt/mem_cache/utils.py",
    "sglang/srt/mem_cache/events.py",
)
FILES = {"vllm-0.24.0": VLLM, "vllm-0.33.0": VLLM, "sglang-0.5.14": SGLANG, "sglang-0.5.23": SGLANG}
"""By release, what is read, in the order of their imports."""
XGRAMMAR = "xgrammar-0.1.32"
"""The release that TensorRT-LLM 1.3 and 1.4 pin."""
_FETCHED = {**FILES, XGRAMMAR: (f"xgrammar/xgrammar_bindings{sysconfig.get_config_var('EXT_SUFFIX')}",)}


def is_there(release: str) -> bool:
    """Return whether the release's files were fetched."""
    return all((DIRECTORY / release / name).exists() for name in _FETCHED[release])


def xgrammar() -> Any:
    """Return the native module of xgrammar; the package around it would import torch."""
    spec = spec_from_file_location("xgrammar_bindings", DIRECTORY / XGRAMMAR / _FETCHED[XGRAMMAR][0])
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def modules(release: str) -> dict[str, Any]:
    """Return the release's modules by the last part of their names; what they import beside them are stand-ins."""
    names = {name.removesuffix(".py").replace("/", "."): DIRECTORY / release / name for name in FILES[release]}
    finder = _Finder(names)
    with mock.patch.dict(sys.modules), mock.patch.object(sys, "meta_path", [finder, *sys.meta_path]):
        for name in [each for each in sys.modules if each.split(".")[0] in ("vllm", "sglang")]:
            del sys.modules[name]
        return {name.rpartition(".")[2]: _imported(name) for name in names}


def _imported(name: str) -> ModuleType:
    __import__(name)
    return sys.modules[name]


class _Finder(MetaPathFinder):
    """Finds the files in `names`, and a stand-in for every other module of an engine."""

    def __init__(self, names: dict[str, Path]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return where the module is."""
        del path, target
        if fullname in self._names:
            return spec_from_file_location(fullname, self._names[fullname], loader=_file(fullname, self._names))
        if fullname.partition(".")[0] in ("vllm", "sglang"):
            return ModuleSpec(fullname, _StandIns(), is_package=True)
        return None


def _file(name: str, names: dict[str, Path]) -> Loader:
    return SourceFileLoader(name, str(names[name]))


class _StandIn(ModuleType):
    config = staticmethod(dataclasses.dataclass)
    ExternalBlockHash = bytes | int
    init_logger = staticmethod(logging.getLogger)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


class _StandIns(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module


def _fetch(release: str) -> None:
    with TemporaryDirectory() as directory:
        name, version = release.rsplit("-", 1)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-cache-dir",
            "--dest",
            directory,
        ]
        subprocess.run([*command, f"{name}=={version}"], check=True)
        (wheel,) = Path(directory).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(DIRECTORY / release, _FETCHED[release])


if __name__ == "__main__":
    for each in _FETCHED:
        if not is_there(each):
            sys.stderr.write(f"fetching the wheel of {each} ...\n")
            _fetch(each)
