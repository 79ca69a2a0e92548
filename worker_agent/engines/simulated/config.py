"""The section `transfer`: timing, buffer and allowed networks of KV transfers between simulated engines."""

from ipaddress import ip_address

from pydantic import Field, field_validator

from kv_runtime.config.sections import Section
from worker_agent.engines.simulated.transfer import UNBOUNDED, TransferRules
from worker_agent.media.addresses import parsed_networks


class KvTransferSection(Section):
    """KV transfers between simulated engines; times are simulated. Only names and sizes are really sent."""

    host: str = Field(
        "127.0.0.1", description="address to bind, and to be fetched from; beyond loopback a closed network"
    )
    port: int = Field(0, ge=0, le=65535, description="0: any free one")
    networks: tuple[str, ...] = Field(
        ("127.0.0.0/8", "::1/128"), max_length=64, description="of the workers that are fetched from"
    )
    token_bytes: int = Field(UNBOUNDED.token_bytes, ge=1, le=1 << 30, description="K/V of one token, all layers")
    bandwidth_bytes_s: float = Field(
        UNBOUNDED.bandwidth_bytes_s, gt=0, le=1e15, description="of one transfer; 50e9 is 400 Gbit/s"
    )
    latency_s: float = Field(UNBOUNDED.latency_s, ge=0, le=60, description="of each transfer, whatever its size")
    buffer_tokens: int = Field(
        0, ge=0, le=1 << 24, description="max_tokens_in_buffer; below the longest prompt transfers stall; 0: no bound"
    )
    timeout_s: float = Field(
        UNBOUNDED.timeout_s,
        gt=0,
        le=3600,
        description="after which fetching fails, and a context that no decode engine fetched is given up",
    )

    @field_validator("networks")
    @classmethod
    def _networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        parsed_networks(networks)
        return networks

    @field_validator("host")
    @classmethod
    def _address(cls, host: str) -> str:
        ip_address(host)  # the very address that others connect to: a name could lead them elsewhere
        if host in ("0.0.0.0", "::"):  # noqa: S104 - it is refused
            raise ValueError(f"found {host}, allowed the address that other workers connect to")
        return host

    @property
    def rules(self) -> TransferRules:
        """The simulator's rules for transfers."""
        return TransferRules(
            token_bytes=self.token_bytes,
            bandwidth_bytes_s=self.bandwidth_bytes_s,
            latency_s=self.latency_s,
            buffer_tokens=self.buffer_tokens or None,
            timeout_s=self.timeout_s,
        )
