"""The accounts and certificates of the data plane: files that are read again when they change.

| file | changed | unreadable or wrong, after the start |
|---|---|---|
| `data.accounts_file` | counts for the next request | the former accounts stay; logged and counted |
| `data.tls_certificate`, `data.tls_key`, `data.tls_client_ca` | count for the next connection | the former stay |

The endpoint picker has the same certificate and authority. Open connections, and the requests on them, stay. Without
`tls_client_ca` clients are asked for no certificate; with it a client needs a certificate that this authority signed.
"""

import asyncio
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from kv_runtime.clock import Clock
from kv_runtime.config.loading import ConfigurationError
from router.http.accounts import Accounts

CHECK_S = 2.0
"""How soon a changed file counts."""

_log = structlog.get_logger("http")


@dataclass(frozen=True)
class ServerTls:
    """The context of new connections, and the contents of its files; `client_ca` is empty without authorities."""

    context: ssl.SSLContext
    key: bytes = field(repr=False)  # no log and no error shows it
    certificate: bytes
    client_ca: bytes


class Credentials:
    """Accounts and TLS of one data plane; a part of its process: `run` watches the files."""

    def __init__(
        self, accounts: str = "", certificate: str = "", key: str = "", client_ca: str = "", clock: Clock | None = None
    ) -> None:
        """Read the files of these paths; an empty path: there is no file. `clock` times the checks of the files.

        Raises:
            ConfigurationError: one cannot be read, or is wrong.
        """
        self._files, self._clock = (accounts, certificate, key, client_ca), clock or Clock()
        self.accounts = Accounts(Path(accounts)) if accounts else None
        self.tls = _server_tls(certificate, key, client_ca) if certificate else None
        self._stamps = self._found()
        self.loads = {"ok": 0, "failed": 0}
        """How often changed files were read again since the start, by outcome; the files of TLS are read together."""

    @property
    def asks_for_nothing(self) -> bool:
        """Whether anybody who reaches the address is served."""
        return self.accounts is None and not self._files[-1]

    async def run(self, stop: asyncio.Event) -> None:
        """Watch the files until `stop` is set."""
        while not stop.is_set():
            await self._clock.wait(stop, CHECK_S)
            if any(self._files):
                await self.check()

    async def check(self) -> None:
        """Read the files that have changed since the last check."""
        stamps = await asyncio.to_thread(self._found)
        accounts, tls = stamps[0] != self._stamps[0], stamps[1:] != self._stamps[1:]
        self._stamps = stamps
        if accounts and self.accounts is not None:
            self._read_again("accounts_file")
        if tls and self.tls is not None:
            self._read_again("tls_certificate")

    def _read_again(self, name: str) -> None:
        try:
            if name == "accounts_file" and self.accounts is not None:
                self.accounts.load()
            else:
                self.tls = _server_tls(*self._files[1:])
        except ConfigurationError as error:
            self.loads["failed"] += 1
            _log.error("credentials_unreadable", setting=f"data.{name}", reason="; ".join(error.problems))
        else:
            self.loads["ok"] += 1
            _log.info("credentials_read", setting=f"data.{name}")

    def _found(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(each) for each in self._files]


def _stamp(file: str) -> tuple[int, int, int] | None:
    """Return values that change when the file, or the link to it, is replaced or written; None: there is no file."""
    try:
        found = Path(file).stat() if file else None
    except OSError:
        return None
    return None if found is None else (found.st_ino, found.st_mtime_ns, found.st_size)


def _server_tls(certificate_file: str, key_file: str, client_ca_file: str) -> ServerTls:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate_file, key_file)
        key, certificate = Path(key_file).read_bytes(), Path(certificate_file).read_bytes()
    except OSError as error:  # `ssl.SSLError` is one
        reason = f"data.tls_certificate: found {certificate_file} with {key_file}: {error.strerror or error}"
        raise ConfigurationError([f"{reason}; allowed a chain and its key, PEM, without a password"]) from error
    client_ca = b""
    if client_ca_file:
        try:
            context.load_verify_locations(client_ca_file)
            client_ca = Path(client_ca_file).read_bytes()
        except OSError as error:
            reason = f"data.tls_client_ca: found {client_ca_file}: {error.strerror or error}"
            raise ConfigurationError([f"{reason}; allowed certificates of authorities, PEM"]) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return ServerTls(context, key, certificate, client_ca)
