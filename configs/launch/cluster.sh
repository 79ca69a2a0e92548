#!/bin/sh
# Three nats-servers that keep the log together, two routers, simulated workers: any one process may die. WORKERS: how many.
exec router up --nats-servers 3 --routers 2 --workers "${WORKERS:-8}" "$@"
