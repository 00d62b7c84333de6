{{- define "larder.labels" -}}
app.kubernetes.io/name: larder
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "larder.metadataLabels" -}}
{{ include "larder.labels" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "larder.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- /* Keys and values in TOML, one on each line. TOML's scalars are written as in JSON. */ -}}
{{- define "larder.toml" -}}
{{- range $key, $value := . }}
{{ $key }} = {{ include "larder.tomlValue" $value }}
{{- end }}
{{- end -}}

{{- /* A map becomes a table on one line; all other values are the same in TOML and JSON. */ -}}
{{- define "larder.tomlValue" -}}
{{- if kindIs "map" . -}}
{ {{- range $number, $key := keys . | sortAlpha }}{{ if $number }},{{ end }} {{ $key }} = {{ include "larder.tomlValue" (get $ $key) }}{{ end }} }
{{- else -}}
{{ . | toJson }}
{{- end -}}
{{- end -}}

{{- /* A node's memory for blocks, in MiB. */ -}}
{{- define "larder.arenaMiB" -}}
{{- if .Values.size -}}
{{ mul (regexFind "^[0-9]+" .Values.size | int64) (get (dict "Mi" 1 "Gi" 1024 "Ti" 1048576) (regexFind "[A-Za-z]+$" .Values.size)) }}
{{- else -}}
{{ int64 .Values.node.arenaMiB }}
{{- end -}}
{{- end -}}

{{- /* "true" if the Prometheus operator scrapes; with "auto", if the cluster knows the operator's resources. */ -}}
{{- define "larder.monitored" -}}
{{- if eq (toString .Values.monitoring.enabled) "auto" -}}
{{- if .Capabilities.APIVersions.Has "monitoring.coreos.com/v1" }}true{{ end -}}
{{- else if .Values.monitoring.enabled -}}
true
{{- end -}}
{{- end -}}

{{- /* The bytes of a size as the configuration has it, from the next whole number of its unit. */ -}}
{{- define "larder.bytes" -}}
{{- $text := kindIs "float64" . | ternary (int64 . | toString) (toString .) | upper | nospace -}}
{{- $units := dict "" 1 "K" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "KI" 1024 "MI" 1048576 "GI" 1073741824 "TI" 1099511627776 -}}
{{- $unit := trimSuffix "B" (regexFind "[A-Z]*$" $text) -}}
{{- if not (hasKey $units $unit) -}}{{- fail (printf "%v is no size: write 64MiB, for example" .) -}}{{- end -}}
{{ mul (add (regexFind "^[0-9]+" $text | int64) (contains "." $text | ternary 1 0)) (get $units $unit) }}
{{- end -}}

{{- /* The memory that a node needs besides its arena, in MiB: deploy/kubernetes/resources explains it. */ -}}
{{- define "larder.besidesMiB" -}}
{{- $disk := get (.Values.node.disk | default dict) "capacity_bytes" | default 0 | include "larder.bytes" | int64 -}}
{{- $ofDisk := div (add $disk 2147483647) 2147483648 -}}
{{- $own := add 512 (div (add (int (include "larder.arenaMiB" .)) 63) 64) $ofDisk (int .Values.node.extraMiB) -}}
{{- $windows := 0 -}}
{{- $others := 0 -}}
{{- range .Values.node.tenants -}}
{{- with .max_window_bytes -}}
{{- $windows = add $windows (include "larder.bytes" . | int64) -}}
{{- else -}}
{{- $others = $own -}}
{{- end -}}
{{- end -}}
{{- $given := div (add $windows 1048575) 1048576 -}}
{{ add $own (max $own (add $given $others)) }}
{{- end -}}

{{- define "larder.tracingToml" -}}
{{- if .Values.tracing.endpoint }}

[tracing]
endpoint = {{ .Values.tracing.endpoint | toJson }}
sample_ratio = {{ .Values.tracing.sampleRatio | toJson }}
{{- end }}
{{- end -}}

{{- define "larder.tracingEgress" -}}
{{- if .Values.tracing.endpoint }}
# The collector of traces.
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ .Values.tracing.namespace }}
  ports:
    - port: {{ int .Values.tracing.port }}
      protocol: TCP
{{- if .dns }}
# DNS, for the collector's name. The resolver's address differs from cluster to cluster.
# OpenShift's resolvers listen on 5353, behind a Service with port 53.
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
    - port: 5353
      protocol: UDP
    - port: 5353
      protocol: TCP
{{- end }}
{{- end }}
{{- end -}}

{{- define "larder.coordinatorToml" -}}
[http]
listen = "{{ .Values.listenAddress | default "0.0.0.0" }}:7600"

[peer]
listen = "{{ .Values.listenAddress | default "0.0.0.0" }}:7601"
ca = "/etc/larder/tls/ca.crt"
certificate = "/etc/larder/tls/tls.crt"
key = "/etc/larder/tls/tls.key"

[state]
path = "/var/lib/larder/coordinator.redb"
{{- with .Values.coordinator.membership }}

[membership]
{{- include "larder.toml" . }}
{{- end }}
{{- if gt (int .Values.coordinator.replicas) 1 }}

[election]
backend = "kubernetes"
name = "{{ .Release.Name }}-leader"
{{- include "larder.toml" .Values.coordinator.election }}
{{- end }}
{{- include "larder.tracingToml" . }}
{{ end -}}

{{- define "larder.nodeToml" -}}
# configure.sh fills in the name{{ if .Values.node.hostNetwork }} and address{{ end }}{{ if .Values.node.detectGpus }}, and the host's GPUs{{ end }}.
name = "@NAME@"

[http]
listen = "{{ .Values.listenAddress | default "0.0.0.0" }}:9440"

[host]
arena_bytes = "{{ include "larder.arenaMiB" . }}MiB"
huge_pages = "{{ if .Values.node.hugePages }}auto{{ else }}never{{ end }}"
{{- include "larder.toml" .Values.node.host }}

# A folder for each tenant: an engine's pod mounts only its tenant's folder.
{{- range .Values.node.tenants }}
[[tenants]]
name = {{ .name | toJson }}
socket = "/run/larder/{{ .name }}/larder.sock"
{{- include "larder.toml" (omit . "name") }}
{{- end }}
{{- with .Values.node.session }}

[session]
{{- include "larder.toml" . }}
{{- end }}
{{- with .Values.node.gpu }}

[gpu]
{{- include "larder.toml" . }}
{{- end }}
{{- with .Values.node.disk }}

[disk]
folder = "/var/lib/larder/disk"
{{- include "larder.toml" . }}
{{- end }}
{{- with .Values.node.object }}

[object]
{{- include "larder.toml" . }}
{{- end }}

[cluster]
coordinator = "{{ .Release.Name }}-coordinator:7601"
listen = "{{ .Values.listenAddress | default "0.0.0.0" }}:9441"
{{- if .Values.node.hostNetwork }}
# The coordinator, in a pod, may see the address of the host's tunnel to pods.
advertise = "@HOST_IP@:9441"
{{- end }}
ca = "/etc/larder/tls/ca.crt"
certificate = "/etc/larder/tls/tls.crt"
key = "/etc/larder/tls/tls.key"
# A pod that ends drains for this time; its terminationGracePeriodSeconds is longer.
drain_ms = {{ mul 1000 (int .Values.node.drainSeconds) }}
{{- include "larder.toml" .Values.node.cluster }}
{{- include "larder.tracingToml" . }}
{{ end -}}

{{- /* The field with a node's name. cert-manager's csi-driver knows the pod's name, but not the host's name. */ -}}
{{- define "larder.nodeName" -}}
{{ eq .Values.certificates.source "cert-manager" | ternary "metadata.name" "spec.nodeName" }}
{{- end -}}

{{- /* The container that issues a pod's certificate from the authority that this chart made; only it sees the authority's key. */ -}}
{{- define "larder.issue" -}}
{{- if eq .root.Values.certificates.source "chart" -}}
- name: certificate
  image: {{ include "larder.image" .root }}
  {{- with .root.Values.image.pullPolicy }}
  imagePullPolicy: {{ . }}
  {{- end }}
  command: [sh, {{ .folder }}/issue.sh]
  args: [{{ .role }}, {{ eq .role "node" | ternary "$(LARDER_NAME)" "main" }}, /etc/larder/authority, /etc/larder/tls]
  {{- if eq .role "node" }}
  env:
    - name: LARDER_NAME
      valueFrom:
        fieldRef:
          fieldPath: {{ include "larder.nodeName" .root }}
  {{- end }}
  resources:
    requests:
      cpu: 10m
      memory: 32Mi
    limits:
      memory: 32Mi
  securityContext:
    runAsNonRoot: true
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
  volumeMounts:
    - name: {{ .volume }}
      mountPath: {{ .folder }}
      readOnly: true
    - name: authority
      mountPath: /etc/larder/authority
      readOnly: true
    - name: tls
      mountPath: /etc/larder/tls
{{- end -}}
{{- end -}}

{{- define "larder.issueVolumes" -}}
- name: tls
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
- name: authority
  secret:
    secretName: {{ .Release.Name }}-authority
    defaultMode: 0440
{{- end -}}
