"""Settings of the endpoint picker."""

from pydantic import Field

from kv_runtime.config.sections import Section

FALLBACKS_MAX = 8


class PickerSection(Section):
    """The endpoint picker: decisions for a gateway of the Gateway API, over gRPC. Needs the extra `gateway`.

    With `data.tls_certificate` it speaks TLS, and with `data.tls_client_ca` asks gateways for a certificate.
    """

    enabled: bool = Field(default=False, description="serve Envoy's external processing")
    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(9002, ge=0, le=65535, description="0: any free one, with one process")
    fallbacks: int = Field(
        0,
        ge=0,
        le=FALLBACKS_MAX,
        description="further endpoints named to the gateway, for its retries; above 0 only for a gateway that takes a"
        " list",
    )
