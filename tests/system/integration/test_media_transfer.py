"""Embeddings between workers over HTTP: once, in time, within bounds, the very bytes, and from no impostor."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.support.manual_clock import ManualClock
from tests.support.parts import at_work
from tests.system.integration.speakers import OK, Speak, endless, says, speaking
from tests.unit.worker_agent.media_samples import SAFETENSORS, refused
from worker_agent.media.config import TransferSection
from worker_agent.media.embedding_transfer import EmbeddingTransfer
from worker_agent.media.encode_wire import HttpDescriptor
from worker_agent.media.http_transfer import PATH, TOKEN_HEADER, HttpEmbeddingTransfer
from worker_agent.media.refusals import MediaRefused


@asynccontextmanager
async def running(
    section: TransferSection | None = None, clock: ManualClock | None = None
) -> AsyncIterator[HttpEmbeddingTransfer]:
    transfer = HttpEmbeddingTransfer(section or TransferSection(), clock or ManualClock())
    await transfer.start()
    async with at_work(*transfer.parts(0)):
        yield transfer


def another(**bounds: Any) -> HttpEmbeddingTransfer:
    """A worker that only fetches."""
    return HttpEmbeddingTransfer(TransferSection(), ManualClock(), **bounds)


async def reason_of(transfer: EmbeddingTransfer[Any, Any], descriptor: HttpDescriptor) -> str:
    with pytest.raises(MediaRefused) as caught:
        await transfer.fetch(descriptor)
    assert descriptor.token not in str(caught.value)
    return refused(caught)


def changed(descriptor: HttpDescriptor, **fields: object) -> HttpDescriptor:
    return msgspec.structs.replace(descriptor, **fields)


async def test_what_is_offered_here_is_fetched_there() -> None:
    large = bytes(range(256)) * 8192  # several chunks
    async with running() as offering:
        for embeddings in (SAFETENSORS, large):
            descriptor = await offering.offer(embeddings)
            told = msgspec.json.decode(msgspec.json.encode(descriptor), type=HttpDescriptor)
            assert await another().fetch(told) == embeddings
        assert offering.offers.taken_total == 2
        assert offering.offers.size_bytes == 0


async def test_embeddings_are_given_once() -> None:
    async with running() as offering:
        descriptor = await offering.offer(SAFETENSORS)
        await another().fetch(descriptor)
        assert await reason_of(another(), descriptor) == "expired"


async def test_two_offers_of_the_same_have_tokens_of_their_own() -> None:
    async with running() as offering:
        first, second = await offering.offer(SAFETENSORS), await offering.offer(SAFETENSORS)
        assert first.token != second.token
        assert await reason_of(another(), changed(first, token="A" * 43)) == "expired"
        assert await another().fetch(second) == await another().fetch(first)


async def test_a_token_is_asked_for_in_a_header_and_nowhere_else() -> None:
    async with running() as offering, aiohttp.ClientSession() as session:
        descriptor = await offering.offer(SAFETENSORS)
        url = f"http://{descriptor.host}:{descriptor.port}{PATH}"
        for headers in ({}, {TOKEN_HEADER: ""}, {TOKEN_HEADER: "é" * 43}, {"Authorization": descriptor.token}):
            async with session.get(f"{url}?token={descriptor.token}", headers=headers) as response:
                assert response.status == 404
        for method in ("HEAD", "POST", "DELETE"):
            async with session.request(method, url, headers={TOKEN_HEADER: descriptor.token}) as response:
                assert response.status == 405
        assert await another().fetch(descriptor) == SAFETENSORS


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("10.0.0.1", "address_network"),
        ("::ffff:127.0.0.1", "address_network"),
        ("localhost", "url_host"),
    ],
)
async def test_a_forged_descriptor_is_refused(host: str, reason: str) -> None:
    made_up = HttpDescriptor(host=host, port=80, token="A" * 43, digest="0" * 64, size_bytes=1)
    assert await reason_of(another(), made_up) == reason


async def test_more_than_one_may_have_is_not_asked_for() -> None:
    async with running() as offering:
        descriptor = await offering.offer(SAFETENSORS)
        small = another(store_bytes_max=len(SAFETENSORS) - 1)
        assert await reason_of(small, descriptor) == "too_large"
        assert len(offering.offers) == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"digest": "0" * 64}, "digest"), ({"size_bytes": 95}, "too_large"), ({"size_bytes": 97}, "incomplete")],
)
async def test_other_bytes_than_were_told_of_are_refused(fields: dict[str, object], reason: str) -> None:
    async with running() as offering:
        descriptor = await offering.offer(SAFETENSORS)
        assert await reason_of(another(), changed(descriptor, **fields)) == reason


@pytest.mark.parametrize(
    ("speak", "reason"),
    [
        pytest.param(endless, "too_large", id="endless"),
        pytest.param(says(then_waits=True), "timeout", id="silent"),
        pytest.param(says(OK, b"Content-Length: 96\r\n\r\n", then_waits=True), "timeout", id="silent after its head"),
        pytest.param(says(OK, b"Content-Length: 96\r\n\r\n", bytes(95)), "incomplete", id="cut"),
        pytest.param(says(OK, b"Content-Length: 96\r\n\r\n", bytes(96)), "digest", id="others"),
        pytest.param(says(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n"), "expired", id="elsewhere"),
        pytest.param(says(b"SSH-2.0\r\n"), "unreachable", id="another protocol"),
    ],
)
async def test_an_impostor_is_refused_whatever_it_answers(speak: Speak, reason: str) -> None:
    async with speaking(speak) as speaker:
        descriptor = HttpDescriptor(host="127.0.0.1", port=speaker.port, token="A" * 43, digest="0" * 64, size_bytes=96)
        fetch_s = 0.1 if reason == "timeout" else 10.0
        assert await reason_of(another(fetch_s=fetch_s), descriptor) == reason
        await speaker.gone.wait()


@pytest.mark.parametrize(
    "fields",
    [
        {"token": "short"},
        {"token": "A" * 43 + "\n"},
        {"digest": "G" * 64},
        {"port": 0},
        {"size_bytes": 0},
        {"size_bytes": 2**41},
        {"host": ""},
        {"url": "http://h/"},
    ],
)
def test_a_descriptor_of_another_form_is_none(fields: dict[str, object]) -> None:
    right = {"host": "127.0.0.1", "port": 80, "token": "A" * 43, "digest": "0" * 64, "size_bytes": 1}
    msgspec.convert(right, HttpDescriptor)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**right, **fields}, HttpDescriptor)


def test_a_descriptor_does_not_show_its_token() -> None:
    descriptor = HttpDescriptor(host="127.0.0.1", port=80, token="A" * 43, digest="0" * 64, size_bytes=1)
    assert "AAAA" not in repr(descriptor)
