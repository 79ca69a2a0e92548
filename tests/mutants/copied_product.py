"""The product in a folder of its own, where a bug may be put in and taken out again.

A copy has an environment whose programs and modules are the copy's; libraries are those of this environment. Its C++
extension is the installed one, until it is built anew: with nanobind, cmake and ninja, which pip puts into the copy.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

COPIED = (
    *("kv_protocol", "kv_runtime", "indexer", "router", "worker_agent", "bench", "dashboards", "configs", "docs"),
    *("containers", "tests", "pyproject.toml", "constraints.txt", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
    *("LICENSE", "Makefile", "mkdocs.yml"),
)
EXTENSIONS = {"indexer": "_core", "router": "_fold"}
PROGRAMS = {"router": "router", "indexer": "indexer", "worker-agent": "worker_agent"}
EVERY_DAY = ("-m", "not slow and not planted")
TEST_S = 60
"""Limit of one test."""


class CopiedProduct:
    """A copy of the repository at `root` in the new folder `folder`."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder, self._python = root, folder, folder / ".venv/bin/python"
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(
                    root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules")
                )
            elif (root / name).is_file():
                shutil.copy2(root / name, folder / name)
        venv.create(folder / ".venv", symlinks=True)
        packages = next((folder / ".venv").glob("lib/python*/site-packages"))
        (packages / "copy.pth").write_text(f"{folder}\n{sysconfig.get_path('purelib')}\n")
        for program, package in PROGRAMS.items():
            script = folder / ".venv/bin" / program
            script.write_text(f"#!{self._python}\nfrom {package}.__main__ import main\nmain()\n")
            script.chmod(0o755)
        for package, name in EXTENSIONS.items():
            if (folder / package / "native").is_dir():
                found = importlib.util.find_spec(f"{package}.native.{name}")
                if found is not None and found.origin is not None:
                    shutil.copy2(found.origin, folder / package / "native")

    def plant(self, file: str, old: str, new: str) -> None:
        """Replace the old text in the copy's file."""
        path = self._folder / file
        path.write_text(path.read_text().replace(old, new))

    def restore(self, file: str) -> None:
        """Put the file back as it was: Python sees that its bytecode is the bug's, and a build that it changed."""
        shutil.copyfile(self._root / file, self._folder / file)
        if file.endswith(".py"):
            shutil.copystat(self._root / file, self._folder / file)

    def build(self) -> bool:
        """Build what changed of the extension, without optimisation; return whether it could be built."""
        made, tools = self._folder / "made", self._folder / "tools"
        environment = os.environ | {"PYTHONPATH": str(tools), "PATH": f"{tools}/bin:{os.environ['PATH']}"}
        if not made.exists():
            needed = tomllib.loads((self._root / "pyproject.toml").read_text())["build-system"]["requires"]
            needed = [*(each for each in needed if each.startswith("nanobind")), "cmake", "ninja"]
            pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--target", tools)
            subprocess.run([*pip, *needed], check=True, stderr=subprocess.DEVNULL)
            flags = (f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Quick", "-DCMAKE_CXX_FLAGS=-DNDEBUG")
            configure = ("cmake", "-G", "Ninja", "-S", self._folder / "indexer/native", "-B", made, *flags)
            subprocess.run(configure, check=True, env=environment, stdout=subprocess.DEVNULL)
        built = subprocess.run(["cmake", "--build", made], check=False, env=environment, stdout=subprocess.DEVNULL)
        for package, name in EXTENSIONS.items():
            for extension in made.glob(f"{name}.*.so"):
                shutil.copy2(extension, self._folder / package / "native")
        return built.returncode == 0

    def test(self, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """Run tests until one fails; return the exit status (None: the limit came first) and what was printed."""
        shutil.rmtree(self._folder / ".hypothesis", ignore_errors=True)  # no example that another bug failed
        options = ("-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--tb=short", "-o", f"timeout={TEST_S}")
        process = subprocess.Popen(
            [str(self._python), "-m", "pytest", *EVERY_DAY, *options, *tests],
            cwd=self._folder,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},  # it is as old as a mutant of the same second and length
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
        return process.returncode, printed
