"""What bytes are, by how they begin: `kv_protocol/image_headers.py` has the table."""

from kv_protocol.image_headers import IMAGE_TYPES, Pixels, image_pixels, image_type

__all__ = ["IMAGE_TYPES", "Pixels", "image_pixels", "image_type"]
