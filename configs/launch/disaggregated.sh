#!/bin/sh
# Simulated workers of each phase. PREFILL and DECODE: how many. Further flags go to `router up`.
exec router up --prefill "${PREFILL:-1}" --decode "${DECODE:-2}" "$@"
