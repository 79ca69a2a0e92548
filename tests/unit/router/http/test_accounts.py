"""Accounts: which key is whose, what the file may say, and how limits grow back."""

from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import SecretStr

from kv_runtime.config.loading import ConfigurationError
from router.__main__ import key as key_command
from router.http.accounts import Account, Accounts, AccountSection
from router.http.heads import Malformed

START_S = 100.0


def entry(name: str, *keys: str, **limits: int) -> str:
    digests = [sha256(each.encode()).hexdigest() for each in keys]
    return f"  - name: {name}\n    keys: {digests}\n" + "".join(f"    {at}: {of}\n" for at, of in limits.items())


def written(tmp_path: Path, *entries: str) -> Path:
    file = tmp_path / "accounts.yaml"
    file.write_text("accounts:\n" + "".join(entries))
    return file


def name_of(accounts: Accounts, **headers: bytes) -> str:
    return accounts.of({name.replace("_", "-").encode(): value for name, value in headers.items()}).name


def test_a_key_in_either_header_names_its_account(tmp_path: Path) -> None:
    accounts = Accounts(written(tmp_path, entry("team-a", "kv-1", "kv-2"), entry("team-b", "kv-3")))
    assert name_of(accounts, authorization=b"Bearer kv-1") == "team-a"
    assert name_of(accounts, authorization=b"bearer  kv-2 ") == "team-a"
    assert name_of(accounts, x_api_key=b"kv-3") == "team-b"
    assert name_of(accounts, authorization=b"Basic kv-1", x_api_key=b"kv-3") == "team-b"


@pytest.mark.parametrize(
    "headers",
    [{}, {b"authorization": b"Bearer "}, {b"authorization": b"Bearer kv-2"}, {b"authorization": b"kv-1"}],
    ids=["none", "empty", "unknown", "no scheme"],
)
def test_any_other_request_is_refused_without_its_key(tmp_path: Path, headers: dict[bytes, bytes]) -> None:
    accounts = Accounts(written(tmp_path, entry("team-a", "kv-1")))
    with pytest.raises(Malformed) as raised:
        accounts.of(headers)
    assert raised.value.status == 401
    assert "kv-2" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("accounts: []\n", "accounts"),
        ("accounts:\n  - name: a\n    keys: [kv-plain]\n", "accounts.0.keys: allowed SHA-256"),
        ("accounts:\n  - name: 'a b'\n    keys: []\n", "accounts.0.name"),
        ("accounts:\n" + entry("a", "kv-1", requests_per_minute=0), "accounts.0.requests_per_minute"),
        ("accounts:\n" + entry("a", "kv-1", request_per_minute=1), "request_per_minute"),
        ("accounts:\n" + entry("a", "kv-1") + entry("b", "kv-1"), "also one of another account"),
        ("accounts:\n" + entry("a", "kv-1") + entry("a", "kv-2"), "a name twice"),
        ("keys: 1\n", "accounts"),
        ("- 1\n", "a mapping"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "accounts.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as raised:
        Accounts(file)
    assert str(file) in str(raised.value)
    assert named in str(raised.value)


def account_with(**limits: int) -> Account:
    return Account(AccountSection(name="team-a", keys=(SecretStr("0" * 64),), **limits))


def test_an_amount_grows_back_evenly_and_never_beyond_itself() -> None:
    account = account_with(tokens_per_minute=60)

    def wait_s(after_s: float) -> float | None:
        refusal = account.refusal(START_S + after_s)
        return None if refusal is None else refusal.retry_after_s

    assert wait_s(0.0) is None
    account.spend("tokens", 60)
    assert wait_s(0.0) == pytest.approx(1.0)
    assert wait_s(0.5) == pytest.approx(0.5)
    assert wait_s(1.0) is None
    account.spend("tokens", 1)
    assert wait_s(1000.0) is None
    account.spend("tokens", 60)
    assert wait_s(1000.0) == pytest.approx(1.0)


def test_requests_beyond_the_rate_wait_for_their_turn() -> None:
    account = account_with(requests_per_minute=2)
    assert [account.refusal(START_S) is None for _ in range(3)] == [True, True, False]
    refusal = account.refusal(START_S)
    assert refusal is not None
    assert (refusal.status, refusal.param, refusal.headers) == (429, "requests_per_minute", ((b"retry-after", b"30"),))
    assert account.refusal(START_S + 30.0) is None


def test_tokens_are_charged_later_and_a_debt_is_waited_for() -> None:
    account = account_with(tokens_per_minute=1000, tokens_per_day=1_000_000)
    assert account.refusal(START_S) is None
    account.spend("tokens", 3000)
    refusal = account.refusal(START_S)
    assert refusal is not None
    assert refusal.param == "tokens_per_minute"
    assert refusal.retry_after_s == pytest.approx(120.06)
    assert account.refusal(START_S + 121.0) is None


def test_a_changed_file_keeps_what_was_used(tmp_path: Path) -> None:
    file = written(tmp_path, entry("team-a", "kv-1", requests_per_minute=2))
    accounts = Accounts(file)
    account = accounts.of({b"x-api-key": b"kv-1"})
    assert account.refusal(START_S) is None
    written(tmp_path, entry("team-a", "kv-2", requests_per_minute=3))
    accounts.load()
    again = accounts.of({b"x-api-key": b"kv-2"})
    assert again is account
    assert [again.refusal(START_S) is None for _ in range(3)] == [True, True, False]
    with pytest.raises(Malformed):
        accounts.of({b"x-api-key": b"kv-1"})
    written(tmp_path, entry("team-a", "kv-2"))
    accounts.load()
    assert again.refusal(START_S) is None


def test_a_file_that_became_wrong_changes_nothing(tmp_path: Path) -> None:
    accounts = Accounts(written(tmp_path, entry("team-a", "kv-1")))
    written(tmp_path, entry("team-b", "kv-1"), entry("team-b", "kv-2"))
    with pytest.raises(ConfigurationError):
        accounts.load()
    assert name_of(accounts, x_api_key=b"kv-1") == "team-a"


def test_the_command_makes_a_key_and_its_entry(tmp_path: Path) -> None:
    printed = CliRunner().invoke(key_command, ["team-a"]).output
    first, rest = printed.split("\n\n", 1)
    key = first.removeprefix("key").strip()
    file = tmp_path / "accounts.yaml"
    file.write_text(rest)
    assert name_of(Accounts(file), x_api_key=key.encode()) == "team-a"
    assert key not in rest
    assert CliRunner().invoke(key_command, ["team a"]).exit_code == 2
