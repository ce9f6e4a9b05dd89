{{- define "qarr.name" -}}
{{- default .Release.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "qarr.labels" -}}
app.kubernetes.io/name: qarr
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Labels by which pods are selected: (list root component tier); without a tier: of all tiers. */}}
{{- define "qarr.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: qarr
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- if gt (len .) 2 }}
qarr/tier: {{ index . 2 }}
{{- end }}
{{- end -}}

{{/* The tiers that are enabled, by name, each with the values of 'engines' that it does not override. */}}
{{- define "qarr.tiers" -}}
{{- $found := dict -}}
{{- range $name, $own := .Values.tiers -}}
{{- if and $own (dig "enabled" true $own) -}}
{{- $tier := deepCopy $.Values.engines -}}
{{- range $key, $value := $own }}{{ $_ := set $tier $key $value }}{{ end -}}
{{- $_ := set $found $name $tier -}}
{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{- define "qarr.image" -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default (index . 0).Chart.AppVersion $image.tag }}
{{- end -}}
{{- end -}}

{{/* Names of Secrets: the chart's own, or existing ones. Empty: there is none. */}}
{{- define "qarr.engineKeySecret" -}}
{{- default (printf "%s-engine-key" (include "qarr.name" .)) .Values.engineKey.existingSecret -}}
{{- end -}}
{{- define "qarr.keysSecret" -}}
{{- if .Values.auth.existingSecret }}{{ .Values.auth.existingSecret }}{{ else if .Values.auth.keys }}{{ include "qarr.name" . }}-keys{{ end -}}
{{- end -}}
{{- define "qarr.redisSecret" -}}
{{- if .Values.redis.existingSecret }}{{ .Values.redis.existingSecret }}{{ else if .Values.redis.url }}{{ include "qarr.name" . }}-redis{{ end -}}
{{- end -}}

{{- define "qarr.claim" -}}
{{- default (printf "%s-checkpoints" (include "qarr.name" .)) .Values.checkpoints.claim -}}
{{- end -}}

{{/* Seconds in which a leaving engine still serves: until every router has looked at the DNS twice. */}}
{{- define "qarr.enginePreStop" -}}
{{- add (mul 2 (int .Values.router.discoverySeconds)) 5 -}}
{{- end -}}

{{/* Put a map over another one, in place: (list base over). */}}
{{- define "qarr.overlay" -}}
{{- $base := index . 0 -}}
{{- range $key, $value := index . 1 -}}
{{- if and (kindIs "map" $value) (kindIs "map" (index $base $key)) -}}
{{- include "qarr.overlay" (list (index $base $key) $value) -}}
{{- else -}}
{{- $_ := set $base $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The routers' settings, as YAML. */}}
{{- define "qarr.settings" -}}
{{- $tiers := dict -}}
{{- $enabled := include "qarr.tiers" . | fromYaml -}}
{{- range $name, $own := .Values.tiers -}}
{{- with index $enabled $name -}}
{{- $tier := dict "dns" (printf "http://%s-%s.%s.svc:8000" (include "qarr.name" $) $name $.Release.Namespace) "precision" .precision -}}
{{- $_ := set $tier "max_model_len" (int .maxModelLen) -}}
{{- $_ := set $tier "max_num_seqs" (int .maxNumSeqs) -}}
{{- $_ := set $tier "max_in_flight" (int .maxInFlight) -}}
{{- $_ := set $tiers $name $tier -}}
{{- else -}}
{{- $_ := set $tiers $name (dict "replicas" 0) -}}
{{- end -}}
{{- end -}}
{{- $settings := dict "server" (dict "host" "0.0.0.0" "port" 8080 "drain_s" 30) "tiers" $tiers -}}
{{- $_ := set $settings "discovery" (dict "interval_s" (int .Values.router.discoverySeconds)) -}}
{{- $_ := set $settings "telemetry" (dict "log_format" "json" "log_file_mb" 0) -}}
{{- if include "qarr.keysSecret" . -}}
{{- $_ := set $settings "auth" (dict "keys_file" "/etc/qarr/keys/keys.json") -}}
{{- else -}}
{{- $_ := set $settings "auth" (dict "allow_keyless" true) -}}
{{- end -}}
{{- if .Values.router.profilesClaim }}{{ $_ := set $settings "policy" (dict "profiles" "/var/lib/qarr/profiles") }}{{ end -}}
{{- include "qarr.overlay" (list $settings .Values.router.settings) -}}
{{- toYaml $settings -}}
{{- end -}}

{{- define "qarr.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "qarr.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Where pods run: (list root values component tier). */}}
{{- define "qarr.placement" -}}
{{- $root := index . 0 -}}
{{- $values := index . 1 -}}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $values.topologySpread }}
topologySpreadConstraints:
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "qarr.selector" (prepend (slice $ 2) $root) | nindent 8 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "qarr.dnsEgress" -}}
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
{{- end -}}
