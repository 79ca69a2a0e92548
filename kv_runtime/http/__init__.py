"""HTTP of every process but the router's data plane. `server` serves an aiohttp application."""
