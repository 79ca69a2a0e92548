"""`router pools`: a router in front of routers. It chooses a pool for each request, and others if that fails."""
