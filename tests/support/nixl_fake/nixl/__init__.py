"""A fake NIXL: agents of one process read each other's registered memory. Strict: what is not as documented raises.

    an agent            belongs to the thread that made it; its metadata name it, and what it has registered by then
    register_memory     [(address, length, device, text)] and "DRAM"; deregistered once, by what it returned
    get_xfer_descs      [(address, length, device)] and "DRAM"; within registered memory, ours or the other's, or the
                        transfer is refused
    initialize_xfer     READ from an agent that was added by metadata that knew the memory
    transfer            PROC, then by `check_xfer_state` PROC `control.steps` times, then DONE, and the notification is
                        there; ERR when the memory is registered no more
    release_xfer_handle once; an error while `control.holds` and the transfer has not ended

Source: ai-dynamo/nixl, `src/api/python/_api.py`, class `nixl_agent`; NVIDIA's guide to NIXL, "Quick Start".
"""

import ctypes
import json
import threading
from typing import Any

_agents: dict[str, "nixl_agent"] = {}


class Control:
    """What a test asks for; `handles` counts those that were not released, `regions` what is registered."""

    steps = 1
    holds = False
    error: Exception | None = None
    handles = 0

    @property
    def regions(self) -> int:
        """Return how many regions all agents have registered."""
        return sum(len(agent.registered) for agent in _agents.values())

    def reset(self) -> None:
        """Be as at the beginning."""
        _agents.clear()
        self.steps, self.holds, self.error, self.handles = 1, False, None, 0


control = Control()


class _Regions:
    def __init__(self, regions: list[tuple[int, int, int, str]]) -> None:
        self.regions = regions


class _Descs:
    def __init__(self, regions: list[tuple[int, int, int]]) -> None:
        self.regions = regions


class _Transfer:
    def __init__(self, ours: _Descs, theirs: _Descs, remote: str, notice: bytes) -> None:
        self.ours, self.theirs, self.remote, self.notice = ours, theirs, remote, notice
        self.steps, self.state, self.is_released = control.steps, "NEW", False


class nixl_agent:  # noqa: N801  as the real one
    """An agent."""

    def __init__(self, agent_name: str, nixl_conf: Any = None, instantiate_all: bool = False) -> None:
        del nixl_conf, instantiate_all
        if control.error is not None:
            raise control.error
        assert agent_name not in _agents
        self.name, self._thread = agent_name, threading.get_ident()
        self.registered: list[_Regions] = []
        self._remotes: dict[str, list[list[int]]] = {}
        self.notices: dict[str, list[bytes]] = {}
        _agents[agent_name] = self

    def register_memory(self, reg_list: Any, mem_type: str | None = None, backends: tuple[str, ...] = ()) -> _Regions:
        """Return what deregisters the regions."""
        self._check()
        assert mem_type == "DRAM"
        assert not backends
        assert all(len(each) == 4 and each[1] > 0 and isinstance(each[3], str) for each in reg_list)
        regions = _Regions(list(reg_list))
        self.registered.append(regions)
        return regions

    def deregister_memory(self, dereg_list: _Regions, backends: tuple[str, ...] = ()) -> None:
        """Forget regions."""
        self._check()
        assert not backends
        self.registered.remove(dereg_list)

    def get_agent_metadata(self) -> bytes:
        """Return what others add this agent by."""
        self._check()
        known = [[address, size] for each in self.registered for address, size, _, _ in each.regions]
        return json.dumps({"name": self.name, "regions": known}).encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        """Return the name of the agent whose metadata these are."""
        self._check()
        told = json.loads(metadata)
        if told["name"] not in _agents:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        self._remotes.setdefault(told["name"], []).extend(told["regions"])
        return str(told["name"])

    def remove_remote_agent(self, agent: str) -> None:
        """Forget an agent."""
        self._check()
        del self._remotes[agent]

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> _Descs:
        """Return descriptors of a transfer."""
        self._check()
        assert mem_type == "DRAM"
        assert all(len(each) == 3 for each in descs)
        return _Descs(list(descs))

    def initialize_xfer(
        self, operation: str, local_descs: _Descs, remote_descs: _Descs, remote_agent: str, notif_msg: bytes = b""
    ) -> _Transfer:
        """Return a transfer that was not begun."""
        self._check()
        assert operation == "READ"
        assert isinstance(notif_msg, bytes)
        if not _covered(remote_descs, self._remotes[remote_agent]) or not _covered(local_descs, self.own_regions()):
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        control.handles += 1
        return _Transfer(local_descs, remote_descs, remote_agent, notif_msg)

    def transfer(self, handle: _Transfer) -> str:
        """Begin a transfer."""
        self._check()
        assert handle.state == "NEW"
        handle.state = "PROC"
        return handle.state

    def check_xfer_state(self, handle: _Transfer) -> str:
        """Return how far it is."""
        self._check()
        assert not handle.is_released
        if handle.state == "PROC" and handle.steps > 0:
            handle.steps -= 1
        elif handle.state == "PROC":
            handle.state = self._moved(handle)
        return handle.state

    def release_xfer_handle(self, handle: _Transfer) -> None:
        """Forget a transfer."""
        self._check()
        assert not handle.is_released
        if control.holds and handle.state == "PROC":
            raise RuntimeError("NIXL_ERR_BACKEND: the transfer cannot be cancelled")
        handle.is_released = True
        control.handles -= 1

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Return the notifications since the last call."""
        self._check()
        notices, self.notices = self.notices, {}
        return notices

    def _moved(self, handle: _Transfer) -> str:
        other = _agents[handle.remote]
        if not _covered(handle.theirs, other.own_regions()):
            return "ERR"
        for (to, size, _), (source, _, _) in zip(handle.ours.regions, handle.theirs.regions, strict=True):
            ctypes.memmove(to, source, size)
        other.notices.setdefault(self.name, []).append(handle.notice)
        return "DONE"

    def own_regions(self) -> list[list[int]]:
        """Return the address and the size of every registered region."""
        return [[address, size] for each in self.registered for address, size, _, _ in each.regions]

    def _check(self) -> None:
        assert threading.get_ident() == self._thread, "NIXL is called by another thread"
        if control.error is not None:
            raise control.error


def _covered(descs: _Descs, regions: list[list[int]]) -> bool:
    return all(
        any(start <= address and address + size <= start + length for start, length in regions)
        for address, size, _ in descs.regions
    )
