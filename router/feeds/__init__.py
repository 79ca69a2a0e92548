"""What a router hears of its fleet: the log's feeds, silence, trust, and rates that were learnt before."""
