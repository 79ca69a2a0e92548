"""Accounts of clients: their API keys, rates and budgets, as the file `data.accounts_file` states them.

    accounts:
      - name: team-a                  # what metrics, logs and fair shares call it
        keys: ["<SHA-256 in hex>"]    # two while one is replaced; `router key` makes a key and its line
        requests_per_minute: 600      # each limit is optional
        tokens_per_minute: 2000000
        tokens_per_day: 500000000

| a request has | outcome |
|---|---|
| a key of an account, in `Authorization: Bearer` or `x-api-key` | served |
| another key, or none | 401, before its body is read |
| a key whose account is beyond a limit | 429 with `Retry-After` |

A used amount grows back evenly, up to the whole limit. Tokens of prompt and answer are charged when the request is
over, so an account may exceed a limit of tokens once, and then waits longer. Each router counts by itself.
Keys are random and long: a hash without salt reveals nothing of them (`KEY_BYTES`).
"""

import re
import secrets
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, SecretStr, field_validator

from kv_runtime.config.loading import ConfigurationError, load_section
from kv_runtime.config.sections import Section
from router.http.heads import Headers, Malformed
from router.http.refusals import Refusal

KEY_BYTES = 32
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_BEARER = b"bearer "
_AMOUNT_MAX = 1 << 50
_MINUTE_S, _DAY_S = 60.0, 86_400.0
_Amount = Annotated[int | None, Field(ge=1, le=_AMOUNT_MAX)]


Counted = Literal["requests", "tokens"]


class Limit(NamedTuple):
    """A kind of limit: of what it `counts`, an amount that grows back within `period_s` seconds."""

    counts: Counted
    period_s: float


class AccountSection(Section):
    """One account of the file. A limit is a field marked with its `Limit`; None: any amount is allowed."""

    name: str = Field(pattern=NAME_PATTERN)
    keys: tuple[SecretStr, ...] = Field(min_length=1, max_length=16)
    requests_per_minute: Annotated[_Amount, Limit("requests", _MINUTE_S)] = None
    tokens_per_minute: Annotated[_Amount, Limit("tokens", _MINUTE_S)] = None
    tokens_per_day: Annotated[_Amount, Limit("tokens", _DAY_S)] = None

    @field_validator("keys")
    @classmethod
    def _are_digests(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if not all(_DIGEST.fullmatch(each.get_secret_value()) for each in keys):  # it may be a key: do not show it
            raise ValueError("allowed SHA-256 digests of keys, in hex, as `router key` prints them")
        return keys


LIMITS = {name: kind for name, f in AccountSection.model_fields.items() for kind in f.metadata if type(kind) is Limit}
"""The limits by name."""
REJECTIONS = tuple(LIMITS)
"""Reasons for which accounts refuse requests: `param` of their refusals."""


class AccountsFile(Section):
    """The file."""

    accounts: tuple[AccountSection, ...] = Field(min_length=1, max_length=100_000)


class Account:
    """An account of clients, and how much it has used of its limits."""

    __slots__ = ("_at_s", "_used", "section")

    def __init__(self, section: AccountSection) -> None:
        self.section = section
        """May be replaced: what was used of a limit stays used, unless the account no longer has the limit."""
        self._used = dict.fromkeys(LIMITS, 0.0)
        """What is used of each limit, by its name, as of `_at_s`."""
        self._at_s = 0.0

    @property
    def name(self) -> str:
        """Its name in metrics, logs and fair shares."""
        return self.section.name

    def refusal(self, now_s: float) -> Refusal | None:
        """Return why a request is refused; None: it is counted, and `spend` must be called with its tokens at its end.

        `now_s` is the time of a clock that never goes back.
        """
        refusal, passed_s, self._at_s = None, now_s - self._at_s, now_s
        for name, limit in LIMITS.items():
            amount = getattr(self.section, name)
            if amount is None:
                self._used[name] = 0.0
                continue
            one_s = limit.period_s / amount
            used = self._used[name] = max(0.0, self._used[name] - passed_s / one_s)
            if refusal is None and used > amount - 1:
                message, wait_s = f"account {self.name}: its {name} are used up", (used + 1 - amount) * one_s
                refusal = Refusal(429, message, name, "rate_limit_exceeded", wait_s)
        if refusal is None:
            self.spend("requests", 1)
        return refusal

    def spend(self, counted: Counted, amount: int) -> None:
        """Add what was used, even if it is more than the limits allow."""
        for name, limit in LIMITS.items():
            self._used[name] += amount * (limit.counts == counted)


class Accounts:
    """The accounts, by their keys. `load` reads the file again; what accounts have used stays."""

    def __init__(self, file: Path) -> None:
        """Read the file; raise `ConfigurationError` as `load` does."""
        self._file = file
        self._by_digest: dict[bytes, Account] = {}
        self._by_name: dict[str, Account] = {}
        self.load()

    def load(self) -> None:
        """Read the file; requests that are being served are not affected.

        Raises:
            ConfigurationError: it cannot be read, or has errors: nothing has changed.
        """
        found = load_section(AccountsFile, self._file).accounts
        problems, by_digest = list[str](), dict[bytes, str]()
        for each in found:
            for digest in each.keys:
                if by_digest.setdefault(bytes.fromhex(digest.get_secret_value()), each.name) != each.name:
                    problems.append(f"{self._file}: {each.name}: a key is also one of another account")
        if len({each.name for each in found}) != len(found):
            problems.append(f"{self._file}: found a name twice, allowed one account of a name, with several keys")
        if problems:
            raise ConfigurationError(problems)
        self._by_name = {each.name: self._by_name.get(each.name) or Account(each) for each in found}
        self._by_digest = {digest: self._by_name[name] for digest, name in by_digest.items()}
        for each in found:
            self._by_name[each.name].section = each

    def of(self, headers: Headers) -> Account:
        """Return the account of the request's key.

        Raises:
            Malformed: 401, the key is missing or unknown.
        """
        given = headers.get(b"authorization", b"")
        key = given[len(_BEARER) :].strip() if given[: len(_BEARER)].lower() == _BEARER else b""
        key = key or headers.get(b"x-api-key", b"")
        account = self._by_digest.get(sha256(key).digest()) if key else None
        if account is None:
            found = "one that is not known" if key else "none"
            raise Malformed(401, f"API key: found {found}, allowed a key in Authorization: Bearer, or in x-api-key")
        return account


def new_key() -> tuple[str, str]:
    """Return a random key for a client, and its digest for the file."""
    key = f"kv-{secrets.token_urlsafe(KEY_BYTES)}"
    return key, sha256(key.encode()).hexdigest()
