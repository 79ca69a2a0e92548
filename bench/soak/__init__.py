"""`router bench soak`: many requests through real processes, with workers and nats-server killed and frozen.

    nats-server   a separate process; its store survives restarts
    router        one process
    workers       `worker-agent serve` with simulated engines; each is started again under its id
    clients       this process: users with one connection and one request at a time each

A run has ten rounds. Between two rounds all is quiet: no request is in flight, every worker is back. There the figures
of all processes are read, which must not grow after the first round, and `indexer verify` compares the index with
every worker's mirror.
"""
