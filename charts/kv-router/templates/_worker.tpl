{{/* Variables of a container with the agent: (list root worker). */}}
{{- define "agent-env" -}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: KVROUTER_WORKER__HOST, value: 0.0.0.0}
- {name: KVROUTER_WORKER__ADVERTISE_HOST, value: $(POD_IP)}
- {name: KVROUTER_WORKER__ROLE, value: {{ (index . 1).role }}}
- {{ include "secret" (list (index . 0) "KVROUTER_WORKER__TOKEN" "worker-token") }}
{{ include "nats-env" (list (index . 0) "agent") }}
{{- end }}

{{/* Arguments of `worker-agent` for an engine in its process: (list root worker). */}}
{{- define "serve-args" -}}
{{- $root := index . 0 }}{{ $worker := index . 1 }}
{{- $args := list "serve" "--engine" $worker.engine "--worker-id" "$(POD_NAME)" "--port" "9000" "--nats-url" (include "nats-url" $root) }}
{{- if eq $worker.engine "trtllm" }}
{{- $args = concat $args (list "--model" $root.Values.model.path "--served-name" $root.Values.model.name "--publish-kv-events" "--publish-metrics") }}
{{- with $worker.engineFile }}{{ $args = concat $args (list "--extra-engine-args" (printf "/etc/engine/%s" (base .))) }}{{ end }}
{{- else }}
{{- $args = concat $args (list "--model" $root.Values.model.name) }}
{{- end }}
{{- concat $args $worker.args | toJson }}
{{- end }}

{{/* Arguments of a server of its own: (list root worker). It binds its event addresses, as these have a `*`. */}}
{{- define "server-args" -}}
{{- $root := index . 0 }}{{ $worker := index . 1 }}
{{- $model := $root.Values.model }}
{{- $events := dict "publisher" "zmq" "endpoint" "tcp://*:5557" "replay_endpoint" "tcp://*:5657" }}
{{- $args := list "--served-model-name" $model.name "--host" "0.0.0.0" "--port" "8000" }}
{{- if eq $worker.engine "vllm" }}
{{- $args = concat $args (list "--model" $model.path "--enable-prefix-caching") }}
{{- $events = set $events "enable_kv_cache_events" true }}
{{- else }}
{{- $args = concat $args (list "--model-path" $model.path "--enable-metrics" "--api-key" "$(WORKER_TOKEN)") }}
{{- end }}
{{- concat $args (list "--kv-events-config" (toJson $events)) $worker.args | toJson }}
{{- end }}

{{/* The containers of one node, or of node 0: (list root worker). */}}
{{- define "worker-containers" -}}
{{- $root := index . 0 }}{{ $worker := index . 1 }}
{{- if has $worker.engine (list "vllm" "sglang") }}
- name: engine
  image: {{ required "workerDefaults.image: vllm and sglang need their image" $worker.image }}
  {{- if eq $worker.engine "sglang" }}
  command: [python3, -m, sglang.launch_server]
  {{- end }}
  args: {{ include "server-args" . }}
  env:
    - {{ include "secret" (list $root (eq $worker.engine "vllm" | ternary "VLLM_API_KEY" "WORKER_TOKEN") "worker-token") }}
    {{- with $worker.env }}{{ toYaml . | nindent 4 }}{{ end }}
  ports: [{name: http, containerPort: 8000}, {name: kv-events, containerPort: 5557}, {name: kv-replays, containerPort: 5657}]
  startupProbe: {httpGet: {path: /health, port: http}, periodSeconds: 10, failureThreshold: 180}  # while the model is loaded
  readinessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 5, timeoutSeconds: 5}
  livenessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
  lifecycle: {preStop: {exec: {command: [sleep, "30"]}}}  # routers send nothing new from its beginning on
  {{- include "worker-resources" . | nindent 2 }}
{{- if eq $root.Values.attach "sidecar" }}
- name: agent
  image: {{ $root.Values.image.agent }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  args: {{ list "attach" "--engine" $worker.engine "--url" "http://$(POD_IP):8000" "--kv-events" "tcp://127.0.0.1:5557" "--replay-endpoint" "tcp://127.0.0.1:5657" "--text" $root.Values.model.path "--worker-id" "$(POD_NAME)" "--nats-url" (include "nats-url" $root) "--port" "9001" "--forward-port" "9000" | toJson }}
  env:
    {{- include "agent-env" . | nindent 4 }}
    - {{ include "secret" (list $root "KVROUTER_ENGINE__API_KEY" "worker-token") }}
    - {{ include "secret" (list $root "KVROUTER_CONTROL__TOKEN" "control-token") }}
    - {name: KVROUTER_CONTROL__HOST, value: 0.0.0.0}
  ports: [{name: forward, containerPort: 9000}, {name: metrics, containerPort: 9001}]
  resources: {requests: {cpu: 250m, memory: 512Mi}, limits: {memory: 2Gi}}
  {{- include "confined" $root | nindent 2 }}
  volumeMounts: [{name: models, mountPath: /models, readOnly: true}]
{{- end }}
{{- else }}
- name: worker
  image: {{ $root.Values.image.agent }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  {{- if gt (int $worker.nodes) 1 }}
  command: [/bin/sh]
  args: {{ concat (list "/etc/launch/launch.sh") (include "serve-args" . | fromJsonArray) | toJson }}
  {{- else }}
  args: {{ include "serve-args" . }}
  {{- end }}
  env:
    {{- include "agent-env" . | nindent 4 }}
    {{- if gt (int $worker.nodes) 1 }}
    - {name: GPUS_PER_NODE, value: {{ $worker.gpus | quote }}}
    {{- end }}
    {{- with $worker.env }}{{ toYaml . | nindent 4 }}{{ end }}
  ports: [{name: metrics, containerPort: 9000}]
  startupProbe: {tcpSocket: {port: 9000}, periodSeconds: 10, failureThreshold: {{ mul 180 $worker.nodes }}}  # the port opens once the engine is loaded
  livenessProbe: {tcpSocket: {port: 9000}, periodSeconds: 10}
  {{- include "worker-resources" . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What each container with an engine has, or a part of one: (list root worker). */}}
{{- define "worker-resources" -}}
{{- $root := index . 0 }}{{ $worker := index . 1 }}
{{- $gpus := ternary (dict "limits" (dict "nvidia.com/gpu" $worker.gpus)) (dict) (gt (int $worker.gpus) 0) -}}
resources: {{ mergeOverwrite $gpus (deepCopy $worker.resources) | toJson }}
securityContext: {{ toJson $worker.securityContext }}
volumeMounts:
  - {name: shm, mountPath: /dev/shm}
  {{- if $root.Values.model.path }}
  - {name: models, mountPath: /models, readOnly: true}
  {{- end }}
  {{- if $worker.engineFile }}
  - {name: engine, mountPath: /etc/engine}
  {{- end }}
  {{- if gt (int $worker.nodes) 1 }}
  - {name: launch, mountPath: /etc/launch}
  - {name: mpi, mountPath: /etc/mpi}
  {{- end }}
{{- end }}

{{/* A pod, but for its containers: (list root worker name). */}}
{{- define "worker-pod" -}}
{{- $root := index . 0 }}{{ $worker := index . 1 }}
{{- include "pod" $root }}
terminationGracePeriodSeconds: 180  # above worker.drain_s + trtllm.shutdown_s
{{- if gt (int $worker.nodes) 1 }}
securityContext: {fsGroup: 10001}  # the image's user reads the key
{{- end }}
{{- with $worker.pod }}
{{ toYaml . }}
{{- end }}
volumes:
  - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $worker.sharedMemory }}}}
  {{- if $root.Values.model.path }}
  - {name: models, persistentVolumeClaim: {claimName: {{ $root.Values.models.claim }}, readOnly: true}}
  {{- end }}
  {{- if $worker.engineFile }}
  - {name: engine, configMap: {name: {{ $root.Release.Name }}-{{ index . 2 }}}}
  {{- end }}
  {{- if gt (int $worker.nodes) 1 }}
  - {name: launch, configMap: {name: {{ $root.Release.Name }}-{{ index . 2 }}-launch}}
  - {name: mpi, secret: {secretName: mpi, defaultMode: 0440}}
  {{- end }}
{{- end }}
