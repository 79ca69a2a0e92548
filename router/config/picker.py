"""Settings of the endpoint picker."""

from pydantic import Field, model_validator

from kv_runtime.config.sections import Section

FALLBACKS_MAX = 8


class PickerSection(Section):
    """The endpoint picker: decisions for a gateway of the Gateway API, over gRPC. Needs the extra `gateway`."""

    enabled: bool = Field(default=False, description="serve Envoy's external processing")
    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(9002, ge=0, le=65535, description="0: any free one, with one process")
    tls_certificate: str = Field("", description="file of the certificate chain, PEM; empty: plain text")
    tls_key: str = Field("", description="file of its private key, PEM")
    fallbacks: int = Field(
        0,
        ge=0,
        le=FALLBACKS_MAX,
        description="further endpoints that the gateway is told, to which it may retry; more than 0 only for a gateway"
        " that takes a list",
    )

    @model_validator(mode="after")
    def _certificate_with_key(self) -> "PickerSection":
        if bool(self.tls_certificate) != bool(self.tls_key):
            found = "tls_certificate" if self.tls_certificate else "tls_key"
            raise ValueError(f"found {found} alone, allowed tls_certificate with tls_key, or neither")
        return self
