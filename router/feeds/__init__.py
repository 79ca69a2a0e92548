"""The feeds of a router: events and heartbeats of its fleet, trust that moves, rates that were learnt before."""
