#!/bin/sh
# Every request is traced to a collector. COLLECTOR: its OTLP address over HTTP. Needs the extra `tracing`.
exec router up --workers "${WORKERS:-4}" --set "tracing.endpoint=${COLLECTOR:-http://127.0.0.1:4318}" --set tracing.ratio=1 "$@"
