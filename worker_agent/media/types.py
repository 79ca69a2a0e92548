"""Recognises media by their first bytes (`kv_protocol/image_headers.py`)."""

from kv_protocol.image_headers import IMAGE_TYPES, ImageType, Pixels, image_pixels, image_type

__all__ = ["IMAGE_TYPES", "ImageType", "Pixels", "image_pixels", "image_type"]
