{{/* Labels of an object of a component: (list $ "router"). */}}
{{- define "labels" -}}
{app.kubernetes.io/name: kv-router, app.kubernetes.io/instance: {{ (index . 0).Release.Name }}, app.kubernetes.io/component: {{ index . 1 }}}
{{- end }}

{{- define "nats-url" -}}
{{ .Values.nats.url | default (printf "nats://%s-nats:4222" .Release.Name) }}
{{- end }}

{{/* A variable from the secret: (list $ "KVROUTER_CONTROL__TOKEN" "control-token"). */}}
{{- define "secret" -}}
{name: {{ index . 1 }}, valueFrom: {secretKeyRef: {name: {{ (index . 0).Values.secret }}, key: {{ index . 2 }}}}}
{{- end }}

{{/* What NATS and the fleet's signatures want of a role, where the secret has it: (list $ "agent"). */}}
{{- define "nats-env" -}}
{{- $root := index . 0 }}{{ $role := index . 1 -}}
{{- if $root.Values.nats.roles -}}
- {name: KVROUTER_NATS__USER, value: {{ $role }}}
{{ end -}}
- {name: KVROUTER_NATS__CREDENTIALS, valueFrom: {secretKeyRef: {name: {{ $root.Values.secret }}, key: nats-{{ $role }}, optional: true}}}
- {name: KVROUTER_NATS__FLEET_KEYS, valueFrom: {secretKeyRef: {name: {{ $root.Values.secret }}, key: fleet-keys, optional: true}}}
{{- end }}

{{/* Of a pod. None of ours asks Kubernetes' API; variables of services could begin with KVROUTER_, which would be refused as settings. */}}
{{- define "pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end }}

{{/* A container of ours, and NATS: without root. */}}
{{- define "confined" -}}
securityContext: {runAsNonRoot: true, runAsUser: 10001, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}, seccompProfile: {type: RuntimeDefault}}
{{- end }}

{{/* Pods of a component on different nodes where there is room: (list $ "router"). */}}
{{- define "spread" -}}
topologySpreadConstraints:
  - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: ScheduleAnyway, labelSelector: {matchLabels: {{ include "labels" . }}}}
{{- end }}

{{/* The file of router or indexer: (list $ (dict ...) .Values.router.config). */}}
{{- define "config" -}}
{{ mustMergeOverwrite (dict "nats" (dict "url" (include "nats-url" (index . 0)) "replicas" (int (index . 0).Values.nats.replicas)) "control" (dict "host" "0.0.0.0" "hosts" (list "*"))) (index . 1) (deepCopy (index . 2)) | toYaml }}
{{- end }}
