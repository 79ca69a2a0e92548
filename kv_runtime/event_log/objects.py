"""Objects of a bucket: named values, in the layout of NATS object stores.

    stream OBJ_<bucket>       $O.<bucket>.C.<id>            the chunks of one put, in order
                              $O.<bucket>.M.<name, base64>  what was put: id, size, SHA-256; one message a name

A put writes the chunks first and the description last, so an object with a description is complete. A delete removes
the description first. `delete_unfinished` removes chunks without a description, of a writer that died, and those of a
damaged description. Names that cannot be decoded are ignored. The stream's leader answers reads: a put can be read at
once, also in a cluster.
"""

import base64
import hashlib
from contextlib import AbstractContextManager

import msgspec
from nats.js.api import ObjectMeta, ObjectMetaOptions
from nats.js.errors import NotFoundError
from nats.js.object_store import ObjectStore

from kv_runtime.event_log.errors import NoSuchObject, ObjectDamaged
from kv_runtime.event_log.streams import StreamClient, StreamSpec

CHUNK_BYTES = 512 * 1024
"""Half of what a server takes in one message."""
_DIGEST = "SHA-256="
_NO_MESSAGE = 10037
"""The server's code for a subject without messages; a missing stream has another code."""


def bucket_spec(bucket: str, *, replicas: int, max_bytes: int) -> StreamSpec:
    """Return the limits of a bucket's stream: a put that does not fit into `max_bytes` is refused."""
    stored = StreamSpec(f"OBJ_{bucket}", (f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"), 0, max_bytes, is_bucket=True)
    return stored._replace(duplicate_window_s=120, replicas=replicas)


class _Info(msgspec.Struct, frozen=True):
    """The description of a put."""

    nuid: str
    size: int = 0
    chunks: int = 0
    digest: str = ""
    deleted: bool = False


class ObjectBucket:
    """The objects of one bucket. A missing bucket or a disconnected server raises `BrokerUnavailable`."""

    def __init__(self, server: StreamClient, bucket: str) -> None:
        self._server, self._context, self._bucket = server, server.context, bucket
        self._stream = f"OBJ_{bucket}"
        self._store = ObjectStore(bucket, self._stream, self._context)

    async def put(self, name: str, data: bytes) -> None:
        """Store `data` under `name`, on disk.

        Raises:
            BrokerUnavailable: also if the data does not fit into the bucket; the name is then unchanged.
        """
        meta = ObjectMeta(name=name, options=ObjectMetaOptions(max_chunk_size=CHUNK_BYTES))
        with self._reachable(f"put {name}"):
            await self._store.put(name, data, meta)

    async def get(self, name: str) -> bytes:
        """Return the data under `name`.

        Raises:
            NoSuchObject: there is none, or it was deleted.
            ObjectDamaged: the bytes are not those that were put.
        """
        with self._reachable(f"get {name}"):
            info = await self._info(name)
            if info.deleted:
                raise NoSuchObject(f"no object {name}")
            data = await self._chunks(info)
        digest = f"{_DIGEST}{base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()}"
        if len(data) != info.size or digest != info.digest:
            raise ObjectDamaged(f"object {name}: found {len(data)} bytes, {digest}, allowed {info.size}, {info.digest}")
        return data

    async def _info(self, name: str) -> _Info:
        """Return the description under `name`, also of a deleted object."""
        try:
            message = await self._context.get_last_msg(self._stream, f"$O.{self._bucket}.M.{_token_of(name)}")
        except NotFoundError as error:
            if error.err_code != _NO_MESSAGE:
                raise
            raise NoSuchObject(f"no object {name}") from None
        try:
            return msgspec.json.decode(message.data or b"", type=_Info)
        except msgspec.DecodeError as error:
            raise ObjectDamaged(f"object {name}: its description cannot be read: {error}") from error

    async def _chunks(self, info: _Info) -> bytes:
        """Return the existing chunks, joined."""
        parts: list[bytes] = []
        seq = 0
        for _ in range(info.chunks):
            try:
                subject = f"$O.{self._bucket}.C.{info.nuid}"
                message = await self._context.get_msg(self._stream, seq + 1, subject, next=True)
            except NotFoundError:
                break
            seq = message.seq or 0
            parts.append(message.data or b"")
        return b"".join(parts)

    async def names(self) -> list[str]:
        """Return all names, ascending."""
        with self._reachable("names"):
            return sorted(await self._names())

    async def _names(self) -> list[str]:
        names = [_name_of(subject) for subject in await self._subjects("M")]
        return [name for name in names if name is not None]

    async def size_bytes(self) -> int:
        """Return the bucket's bytes on disk, as the server reports."""
        with self._reachable("size"):
            return (await self._context.stream_info(self._stream)).state.bytes

    async def delete(self, name: str) -> None:
        """Delete `name` and its chunks, if it exists."""
        with self._reachable(f"delete {name}"):
            put_id = await self._put_id(name)
            if put_id is None:
                return
            await self._purge(f"M.{_token_of(name)}")
            if put_id:
                await self._purge(f"C.{put_id}")

    async def _put_id(self, name: str) -> str | None:
        """Return the id of the put under `name`: empty if its description is damaged, None if there is none."""
        try:
            return (await self._info(name)).nuid
        except NoSuchObject:
            return None
        except ObjectDamaged:
            return ""

    async def delete_unfinished(self, now_ns: int, older_s: float) -> int:
        """Delete chunks without a description that are older than `older_s`; return the number of such puts."""
        deleted_puts = 0
        with self._reachable("sweep"):
            named = {await self._put_id(name) for name in await self._names()}
            for subject in await self._subjects("C"):
                put_id = subject.rpartition(".")[2]
                if put_id in named:
                    continue
                newest = (await self._context.get_last_msg(self._stream, subject)).time
                if newest is None or newest.timestamp() < now_ns / 1e9 - older_s:
                    await self._purge(f"C.{put_id}")
                    deleted_puts += 1
        return deleted_puts

    async def _subjects(self, kind: str) -> list[str]:
        info = await self._context.stream_info(self._stream, subjects_filter=f"$O.{self._bucket}.{kind}.>")
        return list(info.state.subjects or ())

    async def _purge(self, kind_and_id: str) -> None:
        await self._context.purge_stream(self._stream, subject=f"$O.{self._bucket}.{kind_and_id}")

    def _reachable(self, what: str) -> AbstractContextManager[None]:
        return self._server.reachable(f"bucket {self._bucket}: {what}")


def _token_of(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _name_of(subject: str) -> str | None:
    try:
        return base64.urlsafe_b64decode(subject.rpartition(".")[2]).decode()
    except ValueError:
        return None
