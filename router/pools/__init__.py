"""`router pools`: a router before routers. It chooses a pool for each request, and others where that fails."""
