"""The tutorial, as it is written, on the ports that it names: in a network namespace of its own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TUTORIAL = ROOT / "docs/TUTORIAL.md"
LOOPBACK_UP = (
    "import fcntl, os, socket, struct, sys\n"
    "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh22x', b'lo', 0x41))\n"  # SIOCSIFFLAGS: up, running
    "os.execvp(sys.argv[1], sys.argv[1:])\n"
)
ISOLATED = ("unshare", "--map-root-user", "--net", sys.executable, "-c", LOOPBACK_UP)


def isolated(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PATH": path, "HOME": str(folder)}
    return subprocess.run(
        [*ISOLATED, *command], cwd=folder, env=variables, capture_output=True, text=True, timeout=180, check=False
    )


@pytest.fixture
def printed(tmp_path: Path) -> str:
    """What the page's commands print."""
    if not (shutil.which("unshare") and shutil.which("curl")) or isolated("true", folder=tmp_path).returncode:
        pytest.skip("needs curl, and a network namespace: unshare --map-root-user --net")
    script = "\n".join(re.findall(r"^```bash\n(.*?)^```", TUTORIAL.read_text(), re.DOTALL | re.MULTILINE))
    done = isolated("bash", "-c", script, folder=tmp_path)
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout


def test_the_tutorial_shows_what_it_says(printed: str) -> None:
    workers = re.findall(r"x-worker-instance-id: (w\d)", printed)
    overlaps = [int(each) for each in re.findall(r"x-overlap-blocks: (\d+)", printed)]
    assert len(workers) == len(overlaps) == 3
    assert workers[0] == workers[1] != workers[2], "the second goes where the text is, the third where a worker is"
    assert overlaps[0] == overlaps[2] == 0
    assert overlaps[1] > 20
    assert "the prediction held, 896 cached tokens predicted, 896 reported" in printed
    assert f"{workers[0]}/0  refused: " in printed
    assert f"worker.silent  {workers[0]}" in printed
    assert printed.count("equal          4 decisions, bit for bit") == 2
