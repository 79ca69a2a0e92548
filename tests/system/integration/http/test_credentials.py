"""Keys and certificates on real sockets: who gets in, and that a change of the files drops nothing."""

import asyncio
import ssl
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kv_runtime.config.loading import ConfigurationError
from kv_runtime.files import open_files
from router.http.credentials import Credentials
from router.http.plane import REFUSED_MAX
from tests.support.certificates import self_signed
from tests.system.integration.http.serving import answered, get, post, running, until

KEY = b"authorization: Bearer kv-1\r\n"


def accounts_file(tmp_path: Path, *keys: str) -> str:
    file = tmp_path / "accounts.yaml"
    new = tmp_path / "accounts.new"
    new.write_text(f"accounts:\n  - name: team-a\n    keys: {[sha256(each.encode()).hexdigest() for each in keys]}\n")
    new.replace(file)
    return str(file)


def with_tls(tmp_path: Path, **files: Any) -> tuple[str, Credentials]:
    """Return the certificate that is served, and the credentials with it."""
    certificate, key = self_signed(tmp_path, "one")
    return certificate, Credentials(certificate=certificate, key=key, **files)


def trusting(certificate: str, own: tuple[str, str] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificate)
    if own is not None:
        context.load_cert_chain(*own)
    return context


async def test_without_a_key_of_an_account_nothing_is_served(tmp_path: Path) -> None:
    credentials = Credentials(accounts=accounts_file(tmp_path, "kv-1"))
    async with running(credentials=credentials) as http:
        for headers in (b"", b"authorization: Bearer kv-2\r\n"):
            reader, _ = await http.dial(post(headers=headers))
            refused = await answered(reader)
            assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
            assert await reader.read() == b"", "the connection ends: its body is not read"
        reader, writer = await http.dial(get("/v1/models", KEY))
        assert (await answered(reader)).status == 200
        for path in ("/health", "/live", "/ready"):
            writer.write(get(path))
            assert (await answered(reader)).status == 200
        assert [each.account and each.account.name for each in http.exchanges] == ["team-a", None, None, None]


async def test_a_large_body_without_a_key_is_refused_before_it_is_read(tmp_path: Path) -> None:
    credentials = Credentials(accounts=accounts_file(tmp_path, "kv-1"))
    async with running(credentials=credentials) as http:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 60000000\r\n\r\n"
        assert (await http.ask(head)).status == 401


async def test_a_replaced_key_counts_for_the_next_request_and_drops_none(tmp_path: Path) -> None:
    credentials = Credentials(accounts=accounts_file(tmp_path, "kv-1"))
    async with running(credentials=credentials) as http:
        http.hold = True
        reader, writer = await http.dial(get(headers=KEY, path="/v1/models"))
        await until(lambda: len(http.exchanges) == 1)
        accounts_file(tmp_path, "kv-2")
        await credentials.check()
        assert credentials.loads == {"ok": 1, "failed": 0}
        http.exchanges[0].answer(200, b"{}")
        assert (await answered(reader)).status == 200
        writer.write(get(headers=KEY, path="/v1/models"))
        assert (await answered(reader)).status == 401


async def test_a_key_that_is_replaced_while_a_body_comes_counts_for_its_request(tmp_path: Path) -> None:
    credentials = Credentials(accounts=accounts_file(tmp_path, "kv-1"))
    async with running(credentials=credentials) as http:
        reader, writer = await http.dial(get("/v1/models", KEY + b"content-length: 10\r\n") + b"12345")
        await until(lambda: len(http.plane.connections) == 1 and http.client().receiving)
        accounts_file(tmp_path, "kv-2")
        await credentials.check()
        writer.write(b"67890")
        assert (await answered(reader)).status == 200
        (exchange,) = http.exchanges
        assert (exchange.body, exchange.account and exchange.account.name) == (b"1234567890", "team-a")


async def test_a_wrong_file_leaves_the_former_accounts(tmp_path: Path) -> None:
    file = accounts_file(tmp_path, "kv-1")
    credentials = Credentials(accounts=file)
    broken = tmp_path / "accounts.new"
    broken.write_text("accounts: [")
    broken.replace(file)
    await credentials.check()
    (tmp_path / "accounts.yaml").unlink()
    await credentials.check()
    assert credentials.loads == {"ok": 0, "failed": 2}
    assert credentials.accounts is not None
    assert credentials.accounts.of({b"x-api-key": b"kv-1"}).name == "team-a"


async def test_beyond_the_bound_a_client_that_awaits_a_handshake_gets_no_plain_text(tmp_path: Path) -> None:
    _, credentials = with_tls(tmp_path)
    async with running(connections_max=1, credentials=credentials) as http:
        for _ in range(1 + REFUSED_MAX):
            await http.dial()
        assert await http.said(b"") == b""
        assert http.plane.refusals == {503: 1}


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"accounts": "/nowhere/accounts"}, "/nowhere/accounts"),
        ({"certificate": "/nowhere/c.pem", "key": "/nowhere/k.pem"}, "data.tls_certificate"),
    ],
)
def test_a_file_that_is_not_there_ends_the_start(files: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Credentials(**files)


async def test_tls_streams_and_keeps_connections_and_a_new_certificate_drops_none(tmp_path: Path) -> None:
    first, second = self_signed(tmp_path, "first"), self_signed(tmp_path, "second")
    served = tmp_path / "served.pem", tmp_path / "served.key"

    def serve(files: tuple[str, str]) -> None:
        for to, of in zip(served, files, strict=True):
            to.write_bytes(Path(of).read_bytes())

    serve(first)
    credentials = Credentials(certificate=str(served[0]), key=str(served[1]))
    async with running(credentials=credentials) as http:
        http.hold = True
        reader, writer = await http.dial(get("/v1/models"), ssl=trusting(first[0]))
        await until(lambda: len(http.exchanges) == 1)
        serve(second)
        await credentials.check()
        http.exchanges[0].answer(200, b"x" * 1_000_000)
        assert len((await answered(reader)).body) == 1_000_000
        http.hold = False
        writer.write(get("/old"))
        assert (await answered(reader)).body == b"/old?"
        assert (await http.ask(get("/new"), ssl=trusting(second[0]))).body == b"/new?"
        with pytest.raises(ssl.SSLError):
            await http.dial(ssl=trusting(first[0]))
        await until(lambda: http.plane.handshakes_failed == 1)


async def test_a_refusal_over_tls_can_be_read(tmp_path: Path) -> None:
    certificate, credentials = with_tls(tmp_path, accounts=accounts_file(tmp_path, "kv-1"))
    async with running(credentials=credentials, linger_s=0.1) as http:
        assert (await http.ask(post(b"x" * 500_000), ssl=trusting(certificate))).status == 401


async def test_a_client_that_leaves_over_tls_is_noticed(tmp_path: Path) -> None:
    certificate, credentials = with_tls(tmp_path)
    async with running(credentials=credentials) as http:
        http.hold = True
        _, writer = await http.dial(get("/v1/models"), ssl=trusting(certificate))
        await until(lambda: len(http.exchanges) == 1)
        writer.close()
        await until(lambda: len(http.gone) == 1)


async def test_with_an_authority_clients_need_its_certificate(tmp_path: Path) -> None:
    server, client = self_signed(tmp_path, "server"), self_signed(tmp_path, "client")
    stranger = self_signed(tmp_path, "stranger")
    credentials = Credentials(certificate=server[0], key=server[1], client_ca=client[0])
    assert not credentials.asks_for_nothing
    async with running(credentials=credentials) as http:

        async def models(context: ssl.SSLContext) -> int:
            return (await http.ask(get("/v1/models"), ssl=context)).status

        assert await models(trusting(server[0], client)) == 200
        for own in (None, stranger):
            with pytest.raises((OSError, EOFError)):  # TLS 1.3: a client hears in its answer that it is refused
                await models(trusting(server[0], own))
        await until(lambda: http.plane.handshakes_failed == 2)
        assert len(http.exchanges) == 1


async def test_a_client_that_never_shakes_hands_is_cut_off(tmp_path: Path) -> None:
    _, credentials = with_tls(tmp_path)
    async with running(credentials=credentials, head_s=0.05) as http:
        assert await http.said(b"\x16\x03\x01") == b""
        assert (await http.said(get()))[:1] != b"H", "plain text gets no answer of HTTP"
        assert http.plane.handshakes_failed == 2


async def test_handshakes_leave_nothing_behind(tmp_path: Path) -> None:
    certificate, credentials = with_tls(tmp_path)
    context = trusting(certificate)
    async with running(credentials=credentials) as http:

        async def once() -> None:
            reader, writer = await http.dial(get("/v1/models", b"connection: close\r\n"), ssl=context)
            assert (await answered(reader)).status == 200
            writer.close()

        await once()
        await until(lambda: not http.plane.connections)
        before = open_files().used
        for _ in range(20):
            await asyncio.gather(*(once() for _ in range(10)))
        await until(lambda: not http.plane.connections)
        assert open_files().used <= before
