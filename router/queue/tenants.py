"""Names tenants for fair shares, without revealing a secret.

    none       all requests have the same tenant
    api_key    the account of the key (`router/http/accounts.py`); if there are no accounts, a keyed hash of
               `authorization`, else of `x-api-key`; if both are missing, `anonymous`
    a header   its value; without it `anonymous`. A value that is too long, or not printable
               ASCII, is replaced by its hash

A key is neither kept nor written anywhere. The hash uses a secret that the router draws at its start, so that readers
of the journal cannot test keys against it; replicas and later runs name the same tenant differently.
"""

from collections.abc import Callable
from hashlib import blake2b

ANONYMOUS = "anonymous"
SECRET_BYTES = 32
NAME_CHARACTERS_MAX = 64
SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "x-api-key", "cookie"})
"""Headers whose values must not be used as names."""
_HASH_BYTES = 6


class TenantNames:
    """Names tenants. `by`: none, api_key, or the name of a header; `secret` has `SECRET_BYTES` bytes."""

    def __init__(self, by: str, secret: bytes) -> None:
        self._by, self._secret = by, secret
        of_keys, own = (b"authorization", b"x-api-key"), () if by == "none" else (by.encode(),)
        self.headers = frozenset(of_keys if by == "api_key" else own)
        """The headers that are read: all requests without them have the same tenant."""

    def name(self, header: Callable[[bytes], bytes | None], account: str | None = None) -> str:
        """Return the tenant of a request, at most `NAME_CHARACTERS_MAX` printable characters; empty for `none`.

        `header(lower-case name)` returns a header's value, or None. `account` is the name of the key's account.
        """
        match self._by:
            case "none":
                return ""
            case "api_key":
                if account is not None:
                    return account
                key = header(b"authorization") or header(b"x-api-key")
                return f"key-{self._hash(key)}" if key else ANONYMOUS
            case name:
                value = (header(name.encode()) or b"").strip()
                if not value:
                    return ANONYMOUS
                text = value.decode("latin-1")
                is_fit = len(text) <= NAME_CHARACTERS_MAX and text.isascii() and text.isprintable()
                return text if is_fit else f"value-{self._hash(value)}"

    def _hash(self, value: bytes) -> str:
        return blake2b(value, digest_size=_HASH_BYTES, key=self._secret).hexdigest()
