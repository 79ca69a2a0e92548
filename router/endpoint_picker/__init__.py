"""The endpoint picker: decisions of this router for a gateway that sends the requests itself (docs/GATEWAY.md)."""
