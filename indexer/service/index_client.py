"""A client of a live index over HTTP: a router's control plane, or a stand-alone index (`routes.py`)."""

from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from indexer.follow.checkpoint import RankState, decode_state
from kv_protocol.errors import UNDECODABLE, MalformedMessage
from kv_protocol.ids import WorkerRank

_OK, _UNAUTHORIZED, _NOT_FOUND = 200, 401, 404


class IndexUnavailable(Exception):
    """The index cannot be reached, or does not answer as an index does."""


class _RankRow(msgspec.Struct, frozen=True):
    worker_id: str
    dp_rank: int


class RankList(msgspec.Struct, frozen=True):
    """The ranks in the index, and the refused ones with the reason."""

    rows: list[_RankRow] = msgspec.field(name="ranks")
    refused: dict[str, str] = {}

    @property
    def ranks(self) -> list[WorkerRank]:
        """The ranks."""
        return [WorkerRank(each.worker_id, each.dp_rank) for each in self.rows]


class IndexClient:
    """One index at `url`; `token` is its control plane's. Used as `async with`."""

    def __init__(self, url: str, *, token: str, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        patience = aiohttp.ClientTimeout(total=None, connect=timeout_s, sock_read=timeout_s)
        self._session = aiohttp.ClientSession(headers=headers, timeout=patience)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def ranks(self) -> RankList:
        """Return the ranks that the index knows.

        Raises:
            IndexUnavailable: it does not answer, or is not an index.
        """
        status, body = await self._get("/v1/ranks")
        try:
            if status == _OK:
                return msgspec.json.decode(body, type=RankList)
        except UNDECODABLE:
            pass
        raise self._unavailable(f"found {status} at /v1/ranks", "a router's control plane or a stand-alone index")

    async def state(self, rank: WorkerRank) -> RankState | None:
        """Return the state of a rank at one moment; None if the index does not know it.

        Raises:
            IndexUnavailable: as `ranks`.
        """
        status, body = await self._get(f"/v1/ranks/{rank}/blocks?format=columns")
        if status == _NOT_FOUND:
            return None
        try:
            if status == _OK:
                return decode_state(body)
        except MalformedMessage as error:
            raise self._unavailable(str(error), "the state of a rank") from error
        raise self._unavailable(f"found {status} for rank {rank}", "its state")

    async def _get(self, path: str) -> tuple[int, bytes]:
        try:
            async with self._session.get(self._url + path) as response:
                status, body = response.status, await response.read()
        except aiohttp.InvalidURL as error:
            raise self._unavailable("found no address", "http://host:port") from error
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise IndexUnavailable(f"--index-url {self._url}: {str(error) or type(error).__name__}") from error
        if status == _UNAUTHORIZED:
            raise self._unavailable("found no or another token", "its control plane's, as control.token")
        return status, body

    def _unavailable(self, found: str, allowed: str) -> IndexUnavailable:
        return IndexUnavailable(f"--index-url {self._url}: {found}, allowed {allowed}")
