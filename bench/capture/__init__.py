"""Recordings of real engines' KV events, compared with what the engines reused; payloads as engines write them."""
