"""The directory of a router's processes."""

import subprocess
import sys
from pathlib import Path

from router.processes.directory import own_directory


def of_a_dead_process(within: Path) -> Path:
    """Return the directory of a process that has ended, and left it."""
    imports = "from pathlib import Path; from router.processes.directory import own_directory"
    words = f"{imports}; print(own_directory(Path({str(within)!r})))"
    ended = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    return Path(ended.stdout.strip())


def test_a_directory_is_removed_by_the_next_router_once_its_own_has_ended(tmp_path: Path) -> None:
    mine, left = own_directory(tmp_path), of_a_dead_process(tmp_path)
    (left / "policy.json").touch()
    other = tmp_path / "kv-router-processes-no-directory"
    other.touch()
    newest = own_directory(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, newest, other])
    assert newest.stat().st_mode & 0o777 == 0o700
