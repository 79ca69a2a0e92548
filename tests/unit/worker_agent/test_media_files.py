"""Files of the allowed directories, and no others, whatever links and names say."""

import os
from pathlib import Path

import pytest

from tests.unit.worker_agent.media_samples import PNG, reason_of, refused
from worker_agent.media.loader import MediaFiles
from worker_agent.media.refusals import MediaRefused


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    directory = tmp_path / "allowed"
    (directory / "deep").mkdir(parents=True)
    (directory / "deep" / "a.png").write_bytes(PNG)
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "a.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    return directory


def reason(directories: list[Path], path: Path | str, bytes_max: int = 1000) -> str:
    return reason_of(MediaFiles([str(directory) for directory in directories]).read, str(path), "f", bytes_max)


def test_a_file_within_is_read(allowed: Path) -> None:
    assert MediaFiles([str(allowed)]).read(str(allowed / "deep" / "a.png"), "f", len(PNG)) == PNG


def test_without_directories_there_are_no_files(allowed: Path) -> None:
    assert reason([], allowed / "deep" / "a.png") == "path_outside"


@pytest.mark.parametrize(
    "name", ["secret.png", "allowed-not/a.png", "none.png", "allowed", "allowed/../secret.png", ""]
)
def test_nothing_outside_is_read_whether_it_exists_or_not(allowed: Path, name: str) -> None:
    assert reason([allowed], allowed.parent / name) == "path_outside"


def test_links_that_lead_outside_are_refused(allowed: Path) -> None:
    (allowed / "file.png").symlink_to(allowed.parent / "secret.png")
    (allowed / "directory").symlink_to(allowed.parent)
    (allowed / "relative.png").symlink_to("../secret.png")
    (allowed / "chain.png").symlink_to(allowed / "file.png")
    for name in ("file.png", "directory/secret.png", "relative.png", "chain.png"):
        assert reason([allowed], allowed / name) == "path_outside"


def test_links_that_stay_within_are_followed(allowed: Path) -> None:
    (allowed / "link").symlink_to(allowed / "deep")
    linked = allowed.parent / "linked"
    linked.symlink_to(allowed)
    files = MediaFiles([str(linked)])
    assert files.read(str(allowed / "link" / "a.png"), "f", 1000) == PNG
    assert files.read(str(linked / "deep" / "a.png"), "f", 1000) == PNG


def test_a_link_that_leads_in_a_circle_is_no_file(allowed: Path) -> None:
    (allowed / "loop").symlink_to(allowed / "loop")
    assert reason([allowed], allowed / "loop") == "path_missing"


@pytest.mark.parametrize("swapped", ["deep", "deep/a.png"])
def test_a_link_that_appears_after_the_look_opens_nothing(
    allowed: Path, swapped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = MediaFiles([str(allowed)])
    outside = allowed.parent / "allowed-not"
    (allowed / swapped).rename(allowed / "moved")
    (allowed / swapped).symlink_to(outside if swapped == "deep" else outside / "a.png")
    assert (allowed / "deep" / "a.png").read_bytes() == PNG
    monkeypatch.setattr(os.path, "realpath", str)  # the link was not there when the path was resolved
    with pytest.raises(MediaRefused, match=r"symbolic link|Not a directory") as caught:
        files.read(str(allowed / "deep" / "a.png"), "f", 1000)
    assert refused(caught) == "path_missing"


def test_a_missing_file_a_directory_and_a_pipe_are_no_files(allowed: Path) -> None:
    os.mkfifo(allowed / "pipe")
    for name in ("none.png", "deep", "pipe", "deep/a.png/b"):
        assert reason([allowed], allowed / name) == "path_missing"


def test_a_file_is_bounded_and_not_empty(allowed: Path) -> None:
    (allowed / "empty.png").write_bytes(b"")
    assert reason([allowed], allowed / "deep" / "a.png", len(PNG) - 1) == "too_large"
    assert reason([allowed], allowed / "empty.png") == "content"


def test_a_null_byte_is_refused(allowed: Path) -> None:
    assert reason([allowed], f"{allowed}/deep/a.png\0.txt") == "path_form"
