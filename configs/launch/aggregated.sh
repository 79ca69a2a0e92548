#!/bin/sh
# Simulated workers that compute prompts and decode. WORKERS: how many. Further flags go to `router up`.
exec router up --workers "${WORKERS:-4}" "$@"
