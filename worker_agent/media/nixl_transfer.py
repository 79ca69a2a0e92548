"""Transfers embeddings over NIXL: the other worker reads them from this worker's memory, by RDMA if available.

    offer      the bytes are copied once, registered (DRAM), and kept unchanged until the reader's notification
    fetch      local memory is registered, the other agent is added, and a READ is posted that notifies with the token
    release    memory is freed after its deregistration, never before

A process with a descriptor can read its embeddings, and fetching connects to the agent in the descriptor: the network
between workers must be closed, and descriptors come only from encode workers of the fleet. There is no other secret.

Only one thread calls NIXL's agent; the agent cannot wait, so its state is polled every `_POLL_S`. A read that is given
up, and cannot be cancelled, keeps its memory until the process ends, because it may still be written to. Fetching stops
once such memory fills `store_bytes_max`.

Source: NVIDIA's guide to NIXL, "Quick Start" (`nixl.nixl_agent`); ai-dynamo/nixl, `src/api/python/_api.py`, methods of
`nixl_agent`, and the forms of descriptors: (address, length, device) to transfer, with a fourth, a text, to register.
Descriptor lists are not serialized, which is done by pickling there: the numbers go as they are.
"""

import asyncio
import ctypes
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from math import inf
from typing import Any, TypeVar

import structlog

from kv_runtime.clock import Clock
from kv_runtime.supervise import Part
from worker_agent.media.embedding_transfer import EmbeddingTransfer, new_token, refused
from worker_agent.media.encode_wire import AGENT_BYTES_MAX, NixlDescriptor
from worker_agent.media.parts import content_digest
from worker_agent.port.types import EngineError

_POLL_S = 0.002
_DRAM = "DRAM"
_log = structlog.get_logger("nixl")
Answer = TypeVar("Answer")


class RegisteredMemory:
    """Bytes at a fixed address; `registered` is NIXL's registration of them."""

    def __init__(self, size_bytes: int, data: bytes | None = None) -> None:
        self._buffer = (ctypes.c_char * size_bytes)()
        if data is not None:
            ctypes.memmove(self._buffer, data, size_bytes)
        self.address = ctypes.addressof(self._buffer)
        self.registered: Any = None

    def __len__(self) -> int:
        return len(self._buffer)

    def bytes(self) -> bytes:
        """Return a copy."""
        return bytes(self._buffer)


class NixlEmbeddingTransfer(EmbeddingTransfer[RegisteredMemory, NixlDescriptor]):
    """It reads from other workers, and is read by them, from `start` until its `parts` have ended."""

    kind = NixlDescriptor
    wrong_kind = "embeddings over nixl: transfer.over"

    def __init__(self, clock: Clock, **bounds: Any) -> None:  # noqa: ANN401 - as the base has them
        super().__init__(clock, **bounds)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nixl")
        self._agent: Any = None
        self._readers: Counter[Any] = Counter()  # by the other agent's name, the number of reads from it now
        self._knowing = asyncio.Lock()
        self._stuck: list[RegisteredMemory] = []

    async def start(self) -> None:
        """Create the agent; raise `EngineError` if the package is missing, or finds no transport."""
        name = f"kv-router-{secrets.token_hex(8)}"
        try:
            self._agent = await self._call(lambda: import_module("nixl").nixl_agent(name))
        except Exception as error:
            raise EngineError(f"nixl cannot be used: {type(error).__name__}: {error}") from error

    def parts(self, stage: int) -> tuple[Part, ...]:
        """Return the parts that serve offers; after `start`."""
        return (Part("embeddings-nixl", self._tend, stage),)

    async def offer(self, embeddings: bytes) -> NixlDescriptor:
        """Offer a copy of `embeddings`."""
        digest = await asyncio.to_thread(content_digest, embeddings)
        memory, token = RegisteredMemory(len(embeddings), embeddings), new_token()
        await self._let_go(self.offers.expire(self._clock.now()))
        self.offers.offer(token, memory, self._clock.now())
        try:
            await self._register(memory)
            # The agent's metadata changes with its registrations: each descriptor has the current one.
            agent = _bounded(await self._call(self._agent.get_agent_metadata))
        except BaseException:
            await self._end_offer(token)
            raise
        return NixlDescriptor(
            agent=agent, address=memory.address, token=token, digest=digest, size_bytes=len(embeddings)
        )

    # ------------------------------------------------------------------------------------------- reading
    async def _read(self, descriptor: NixlDescriptor) -> bytes:
        if sum(map(len, self._stuck)) + descriptor.size_bytes > self._store_bytes_max:
            raise refused("unreachable", descriptor, "a process that has not given up so many reads")
        memory = RegisteredMemory(descriptor.size_bytes)
        try:
            await self._register(memory)
            async with self._known(descriptor) as remote:
                await self._filled(memory, descriptor, remote)
        finally:
            if memory not in self._stuck:
                await self._let_go([memory])
        return memory.bytes()

    @asynccontextmanager
    async def _known(self, descriptor: NixlDescriptor) -> AsyncIterator[Any]:
        """Add the other agent for the block; remove it after the last read from it."""
        async with self._knowing:
            remote = await self._tried(descriptor, lambda: self._agent.add_remote_agent(descriptor.agent))
            self._readers[remote] += 1
        try:
            yield remote
        finally:
            async with self._knowing:
                self._readers[remote] -= 1
                if not self._readers[remote]:
                    del self._readers[remote]
                    await self._quietly(lambda: self._agent.remove_remote_agent(remote))

    async def _filled(self, memory: RegisteredMemory, descriptor: NixlDescriptor, remote: Any) -> None:  # noqa: ANN401 - NIXL's
        agent, handles = self._agent, list[Any]()

        def begun() -> str:
            ours = agent.get_xfer_descs([(memory.address, len(memory), 0)], mem_type=_DRAM)
            theirs = agent.get_xfer_descs([(descriptor.address, len(memory), 0)], mem_type=_DRAM)
            handles.append(agent.initialize_xfer("READ", ours, theirs, remote, descriptor.token.encode()))
            return str(agent.transfer(handles[0]))

        try:
            state = await self._tried(descriptor, begun)
            while state == "PROC":
                await self._clock.sleep(_POLL_S)
                state = await self._tried(descriptor, lambda: agent.check_xfer_state(handles[0]))
            if state != "DONE":
                raise refused("expired", descriptor, f"embeddings that wait; the transfer's state is {state}")
        finally:  # the thread has begun it, or will before it does this
            if not await self._quietly(lambda: [agent.release_xfer_handle(handle) for handle in handles]):
                self._stuck.append(memory)  # it goes on, and cannot be stopped

    async def _tried(self, descriptor: NixlDescriptor, work: Callable[[], Answer]) -> Answer:
        try:
            return await self._call(work)
        except Exception as error:
            raise refused("unreachable", descriptor, f"a worker that answers ({type(error).__name__})") from error

    # ------------------------------------------------------------------------------------------- keeping
    async def _tend(self, stop: asyncio.Event) -> None:
        """Free embeddings that were read or have expired; at the end all of them."""
        while not stop.is_set():
            await self._clock.wait(stop, _POLL_S)
            notices = await self._call(self._agent.get_new_notifs)
            for token in [each for tokens in notices.values() for each in tokens]:
                memory = self.offers.take(token.decode("ascii", "replace"), self._clock.now())
                await self._let_go([] if memory is None else [memory])
            await self._let_go(self.offers.expire(self._clock.now()))
        await self._let_go(self.offers.expire(inf))
        self._thread.shutdown(wait=False)

    async def _register(self, memory: RegisteredMemory) -> None:
        def work() -> None:
            memory.registered = self._agent.register_memory([(memory.address, len(memory), 0, "")], _DRAM)

        await self._call(work)

    async def _let_go(self, removed: Sequence[RegisteredMemory]) -> None:
        for memory in removed:
            if not await self._quietly(partial(self._deregister, memory)):
                self._stuck.append(memory)

    def _deregister(self, memory: RegisteredMemory) -> None:
        """Deregister memory; runs on the agent's thread, after earlier calls."""
        if memory.registered is not None:
            self._agent.deregister_memory(memory.registered)

    async def _quietly(self, work: Callable[[], object]) -> bool:
        """Run `work` on the agent's thread, even if the waiting task is cancelled; return whether it succeeded."""
        try:
            await asyncio.shield(self._call(work))
        except Exception as error:  # noqa: BLE001 - NIXL's own
            _log.warning("nixl_not_done", reason=f"{type(error).__name__}: {error}")
            return False
        return True

    def _call(self, work: Callable[[], Answer]) -> "asyncio.Future[Answer]":
        return asyncio.get_running_loop().run_in_executor(self._thread, work)


def _bounded(agent: bytes) -> bytes:
    if len(agent) > AGENT_BYTES_MAX:
        raise EngineError(f"nixl: found {len(agent)} bytes of its agent's metadata, allowed {AGENT_BYTES_MAX}")
    return agent
