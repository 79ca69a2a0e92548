# Sourced by trtllm-*.sh: their options, the router, and the end of all processes together.
set -eum  # -m: each process has a group of its own, so that Ctrl-C reaches this script alone
declare -A option+=([model]='' [text]='' [tracing]='' [port]=8000 [control-port]=8001 [nats-port]=4222)
worker_flags=() workers=() servers=()

help() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  cat <<'END'

Of all trtllm scripts:
  --model DIR            the model's directory; needed
  --text DIR             its tokenizer and template, where they are not in that directory; `byte` for tests
  --tracing URL          a collector, to which every request is traced (OTLP over HTTP; extra `tracing`)
  --port, --control-port, --nats-port
  --                     what follows are flags of `worker-agent serve`, for every worker:
                         --served-name, --modality multimodal, --tool-call-parser, --trtllm.max_num_tokens 8192 ...
Ctrl-C ends all; a process that ends by itself ends all, with status 1.
END
}

while [ $# -gt 0 ]; do
  name=${1#--}
  if [ "$1" = -h ] || [ "$1" = --help ]; then help; exit 0
  elif [ "$1" = -- ]; then worker_flags+=("${@:2}"); break
  elif [ "$1" != "$name" ] && [ -n "$name" ] && [ -n "${option[$name]+is}" ]; then
    option[$name]=${2?"$1: found nothing, allowed a value"}; shift 2
  else echo "$0: found $1, allowed what --help lists" >&2; exit 2; fi
done
[ -n "${option[model]}" ] || { echo "$0: found no --model, allowed the model's directory" >&2; exit 2; }
router_flags=(--text "${option[text]:-${option[model]}}" --port "${option[port]}" --control-port "${option[control-port]}")
[ -z "${option[text]}" ] || worker_flags+=(--set "engine.text=${option[text]}")
if [ -n "${option[tracing]}" ]; then
  router_flags+=(--set "tracing.endpoint=${option[tracing]}" --set tracing.ratio=1)
  worker_flags+=(--set "tracing.endpoint=${option[tracing]}")
fi

end() {  # workers before the router and NATS, so that they can leave the fleet
  trap '' INT TERM
  kill "${workers[@]}" 2> /dev/null || :
  for each in "${workers[@]}"; do wait "$each" || :; done
  for each in "${servers[@]}"; do kill "$each" 2> /dev/null && wait "$each" || :; done
}
trap end EXIT
trap 'exit 0' INT TERM

start_router() {
  router "${router_flags[@]}" "$@" & servers=($! "${servers[@]}")  # ends before NATS
}

next_gpu=0
start_worker() {  # start_worker ROLE NUMBER GPUS ENGINE_ARGUMENTS
  local gpus
  gpus=$(seq -s, "$next_gpu" $((next_gpu + $3 - 1))) next_gpu=$((next_gpu + $3))
  CUDA_VISIBLE_DEVICES=$gpus worker-agent serve --engine trtllm --role "$1" --worker-id "$1-$2" --model "${option[model]}" \
    --nats-url "nats://127.0.0.1:${option[nats-port]}" --port 0 --publish-kv-events --publish-metrics \
    ${4:+--extra-engine-args "$4"} "${worker_flags[@]}" & workers+=($!)
}

until_one_ends() {
  wait -n || :
  echo "$0: a process ended; all end" >&2
  exit 1
}
