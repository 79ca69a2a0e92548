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

A limit grows back evenly, up to its whole amount. Tokens of prompt and answer are charged when the request is over, so
that an account may once go beyond a limit of tokens, and then waits longer. Each router counts by itself.
Keys are random and long: a hash without salt reveals nothing of them (`KEY_BYTES`).
"""

import re
import secrets
from collections.abc import Mapping
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


class Usage(NamedTuple):
    """What an account has used. A request counts when it begins, its tokens when it is over."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt_tokens + self.output_tokens


class Limit(NamedTuple):
    """What a limit bounds: an attribute of `Usage`. The amount grows back within `period_s` seconds."""

    counts: Literal["requests", "tokens", "prompt_tokens", "output_tokens"]
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
        if not all(_DIGEST.fullmatch(each.get_secret_value()) for each in keys):  # it may be a key: it is not shown
            raise ValueError("allowed SHA-256 digests of keys, in hex, as `router key` prints them")
        return keys


LIMITS = {name: kind for name, f in AccountSection.model_fields.items() for kind in f.metadata if type(kind) is Limit}
"""The limits by name."""
REJECTIONS = tuple(LIMITS)
"""Reasons for which accounts refuse requests: `param` of their refusals."""


class AccountsFile(Section):
    """The file."""

    accounts: tuple[AccountSection, ...] = Field(min_length=1, max_length=100_000)


class Allowance:
    """An amount that grows back evenly within `period_s`. Times are of one clock that does not go back."""

    __slots__ = ("_amount", "_at_s", "_left", "_period_s")

    def __init__(self, amount: int, period_s: float, now_s: float) -> None:
        self._amount, self._period_s = amount, period_s
        self._left, self._at_s = float(amount), now_s

    def wait_s(self, now_s: float) -> float:
        """Return how long it takes until there is one left; 0: there is."""
        self._left = min(self._amount, self._left + (now_s - self._at_s) * self._amount / self._period_s)
        self._at_s = now_s
        return max(0.0, (1 - self._left) * self._period_s / self._amount)

    def spend(self, count: int) -> None:
        """Take `count` away, even if fewer are left."""
        self._left -= count

    def changed(self, amount: int) -> None:
        """Allow another amount from now on; what is spent stays spent."""
        self._left += amount - self._amount
        self._amount = amount


class Account:
    """Who sent a request: a name, and how much it may still use."""

    __slots__ = ("_limits", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._limits: dict[str, Allowance] = {}

    def allow(self, amounts: Mapping[str, int | None], now_s: float) -> None:
        """Allow these amounts of `LIMITS` from now on; None: any."""
        for name, amount in amounts.items():
            if amount is None:
                self._limits.pop(name, None)
            elif name in self._limits:
                self._limits[name].changed(amount)
            else:
                self._limits[name] = Allowance(amount, LIMITS[name].period_s, now_s)

    def refusal(self, now_s: float) -> Refusal | None:
        """Return why a request is refused; None: it is counted, and at its end `spend` must be told of its tokens."""
        for name, allowance in self._limits.items():
            if wait_s := allowance.wait_s(now_s):
                return Refusal(429, f"account {self.name}: its {name} are used up", name, "rate_limit_exceeded", wait_s)
        self.spend(Usage(requests=1))
        return None

    def spend(self, usage: Usage) -> None:
        """Take what was used from the limits that count it."""
        for name, allowance in self._limits.items():
            allowance.spend(getattr(usage, LIMITS[name].counts))


class Accounts:
    """The accounts, by their keys. `load` reads the file again; what accounts have used stays."""

    def __init__(self, file: Path, now_s: float) -> None:
        """Read the file; raise `ConfigurationError` as `load`."""
        self._file = file
        self._by_digest: dict[bytes, Account] = {}
        self._by_name: dict[str, Account] = {}
        self.load(now_s)

    def load(self, now_s: float) -> None:
        """Read the file; requests that are being served go on.

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
        self._by_name = {each.name: self._by_name.get(each.name) or Account(each.name) for each in found}
        self._by_digest = {digest: self._by_name[name] for digest, name in by_digest.items()}
        for each in found:
            self._by_name[each.name].allow({name: getattr(each, name) for name in LIMITS}, now_s)

    def of(self, headers: Headers) -> Account:
        """Return the account of the request's key.

        Raises:
            Malformed: 401.
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
