"""Environments with wheels, which borrow their dependencies from the environment of the tests."""

import subprocess
import sys
import sysconfig
from pathlib import Path


def python_with(environment: Path, *wheels: Path) -> Path:
    """Return the interpreter of a new environment that has the wheels."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", *map(str, wheels)]
    subprocess.run(pip, check=True)
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([str(python), "-c", show], capture_output=True, text=True, check=True).stdout.strip()
    Path(packages, "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return python
