"""Files that are replaced: they are whole, and no other user reads them."""

import stat
from pathlib import Path

import pytest

from kv_runtime.files import replace_file


@pytest.mark.parametrize("left", ["state.new", "state.json", "other"], ids=["half written", "present", "none"])
def test_only_its_user_reads_a_file_whatever_was_there_before(tmp_path: Path, left: str) -> None:
    before, path = tmp_path / left, tmp_path / "state.json"
    before.write_text("before")
    before.chmod(0o644)
    replace_file(path, b"now")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"now", 0o600)
    assert not (tmp_path / "state.new").exists()
