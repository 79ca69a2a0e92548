"""A changed policy over restarts: what is stored, what wins, and that a file that cannot be used is said."""

import asyncio
import os
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from kv_runtime.config.loading import ConfigurationError, given_paths
from router.config import RouterSettings
from router.decision.policies import MODES
from router.decision.policy import Policy
from router.decision.policy_store import PolicyNotStored, PolicyStore, fields_of


def stored(directory: Path, configured: Policy | None = None, *given: str) -> PolicyStore:
    """Return the store of a router that starts."""
    store = PolicyStore(str(directory), configured or Policy(), MODES)
    store.restore(given)
    return store


def test_without_a_file_the_configured_policy_holds(tmp_path: Path) -> None:
    configured = Policy(mode="round-robin")
    assert stored(tmp_path / "made" / "here", configured).initial == configured


async def test_what_was_changed_is_restored_and_the_rest_is_as_configured_now(tmp_path: Path) -> None:
    await stored(tmp_path).keep({"mode": "random"})
    await stored(tmp_path).keep({"temperature": 0.5})
    with capture_logs() as logged:
        initial = stored(tmp_path, Policy(affinity_discount=0.7)).initial
    assert (initial.mode, initial.temperature, initial.affinity_discount) == ("random", 0.5, 0.7)
    (line,) = logged
    assert (line["event"], line["fields"]) == ("policy_restored", {"mode": "random", "temperature": 0.5})


async def test_the_command_line_wins_over_what_was_stored(tmp_path: Path) -> None:
    await stored(tmp_path).keep({"mode": "random", "temperature": 0.5})
    initial = stored(tmp_path, Policy(mode="kv"), "mode").initial
    assert (initial.mode, initial.temperature) == ("kv", 0.5)


def test_the_command_line_names_fields_one_by_one_or_in_a_section() -> None:
    assignments = ("policy.temperature=0.1", "policy={mode: kv, seed: 1}", "nats.port=0")
    given = given_paths(RouterSettings, assignments, {"data.port": 1, "nats.url": None})
    assert given == {"policy.temperature", "policy.mode", "policy.seed", "nats.port", "data.port"}


async def test_every_field_of_a_policy_is_restored_as_it_was(tmp_path: Path) -> None:
    policy = replace(Policy(mode="predicted-ttft"), temperature=0.25, ttft_target_s=1.5)
    await stored(tmp_path).keep(fields_of(policy))
    assert stored(tmp_path).initial == policy


async def test_nothing_is_restored_after_a_reset(tmp_path: Path) -> None:
    await stored(tmp_path).keep({"mode": "random"})
    await stored(tmp_path).clear()
    with capture_logs() as logged:
        assert stored(tmp_path).initial == Policy()
    assert logged == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "found no stored policy"),
        (b'{"version": 1, "fields": {"mode": "kv"', "found no stored policy"),
        (b'{"version": 2, "fields": {}}', "found no stored policy (Invalid enum value 2"),
        (b'{"version": 1, "fields": {"mode": "gone"}}', 'policy.mode: found "gone", allowed kv'),
        (b'{"version": 1, "fields": {"temprature": 1}}', "policy.temprature: unknown; allowed: mode"),
        (b'{"version": 1, "fields": {"temperature": -1}}', "policy.temperature: found -1"),
        (b" " * ((1 << 20) + 1), "found 1048577 bytes, allowed 1048576"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_path_and_what_to_do(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "policy.json"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError) as refused:
        stored(tmp_path)
    (problem,) = refused.value.problems
    assert problem.startswith(f"state.dir: {path}: {words}")
    assert problem.endswith("; mend or remove the file; without it the policy is that of the configuration")


NEEDED = "allowed a directory that the router can make and write into"


def refusal(directory: Path) -> str:
    with pytest.raises(ConfigurationError) as refused:
        stored(directory)
    (problem,) = refused.value.problems
    return problem


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file") == f"state.dir: found {tmp_path / 'file'}, which is a file, {NEEDED}"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("file/below", "Not a directory"), ("a\0b", "embedded null byte"), ("x" * 300, "File name too long")],
)
def test_a_directory_that_cannot_be_made_is_refused_with_the_reason(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").write_text("")
    found = refusal(tmp_path / name)
    assert found == f"state.dir: found {tmp_path / name}, which cannot be made ({reason}), {NEEDED}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into any directory")
def test_a_directory_that_may_not_be_written_into_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir(mode=0o500)
    assert refusal(tmp_path / "kept") == (
        f"state.dir: found {tmp_path / 'kept'}, which the router may not write into, {NEEDED}"
    )


def test_a_directory_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.mkdir()
    assert refusal(tmp_path) == f"state.dir: {path}: found what cannot be read (Is a directory), allowed a file"


async def test_a_policy_that_cannot_be_written_is_not_stored_and_the_file_is_as_it_was(tmp_path: Path) -> None:
    await stored(tmp_path).keep({"mode": "random"})
    store = stored(tmp_path)
    (tmp_path / "policy.new").mkdir()  # where the file is written first
    with pytest.raises(PolicyNotStored, match="cannot be written: Is a directory"):
        await store.keep({"mode": "kv"})
    assert stored(tmp_path).initial.mode == "random"


async def test_a_process_that_starts_later_begins_with_the_policy_in_force(tmp_path: Path) -> None:
    store = stored(tmp_path)
    store.begin_with(b"")
    assert store.initial == store.configured
    store.begin_with(b'{"mode": "random"}')
    assert (store.initial.mode, store.configured.mode) == ("random", "kv")


async def test_a_reader_finds_the_file_before_or_after_a_change_and_never_between(tmp_path: Path) -> None:
    store = stored(tmp_path)
    await store.keep({"temperature": 0.0})

    async def change() -> None:
        for number in range(20):
            await store.keep({"temperature": number / 100, "mode": "random"})

    changing = asyncio.ensure_future(change())
    while not changing.done():
        assert stored(tmp_path).initial.temperature <= 0.2
        await asyncio.sleep(0)
    assert sorted(os.listdir(tmp_path)) == ["policy.json"]  # noqa: PTH208 - the names alone
