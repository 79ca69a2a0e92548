"""The NATS client, which connects again however the server ended the connection."""

from nats.aio.client import Client
from nats.errors import Error
from nats.protocol.parser import PERMISSIONS_ERR, STALE_CONNECTION


class LastingClient(Client):
    """Connects again also after the server ended the connection by an error.

    A server does so when its credentials or limits were changed, or too many clients are connected. The library's
    client would then stay closed, and the process end. Errors before the first connection are raised as by the library.
    """

    ended_by = ""
    """The server's error that ended the last connection; empty: no error did."""

    async def _process_err(self, err_msg: str) -> None:
        if not self.is_connected or PERMISSIONS_ERR in err_msg or STALE_CONNECTION in err_msg:
            await super()._process_err(err_msg)
        else:
            self.ended_by = err_msg.strip("'")
            await self._process_op_err(Error(f"nats: {self.ended_by}"))
