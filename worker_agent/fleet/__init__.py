"""A worker's membership in the fleet: its id, its registration, the canary request of an idle engine."""
