"""KV events from the engine to the log: publisher, consolidator, one canonical stream for each rank."""
