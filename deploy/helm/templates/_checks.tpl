{{/* What the schema cannot tell. */}}
{{- define "qarr.checks" -}}
{{- $v := .Values -}}
{{- $tiers := include "qarr.tiers" . | fromYaml -}}
{{- if not $tiers }}{{ fail "tiers: all are disabled; enable at least one" }}{{ end -}}
{{- if not (or $v.engineKey.value $v.engineKey.existingSecret) }}{{ fail "engineKey: give value (openssl rand -hex 24), or existingSecret with the key api-key" }}{{ end -}}
{{- if and $v.engineKey.value $v.engineKey.existingSecret }}{{ fail "engineKey: give value or existingSecret, not both" }}{{ end -}}
{{- if and $v.auth.keys $v.auth.existingSecret }}{{ fail "auth: give keys or existingSecret, not both" }}{{ end -}}
{{- if not (or $v.auth.keys $v.auth.existingSecret $v.auth.allowKeyless) }}{{ fail "auth: give keys or existingSecret (the file that 'qarr keys add NAME' writes), or allowKeyless: true to serve everybody who reaches the router" }}{{ end -}}
{{- if and $v.auth.allowKeyless (or $v.auth.keys $v.auth.existingSecret) }}{{ fail "auth: allowKeyless does not go with keys; leave one out" }}{{ end -}}
{{- if and $v.redis.url $v.redis.existingSecret }}{{ fail "redis: give url or existingSecret, not both" }}{{ end -}}
{{- if and $v.router.autoscaling.enabled (gt (int $v.router.autoscaling.minReplicas) (int $v.router.autoscaling.maxReplicas)) }}{{ fail "router.autoscaling: minReplicas is above maxReplicas" }}{{ end -}}
{{- with $v.router.tokenizer }}{{ if not (hasKey $tiers .) }}{{ fail (printf "router.tokenizer: there is no enabled tier %s; allowed: %s, or empty" . (keys $tiers | sortAlpha | join ", ")) }}{{ end }}{{ end -}}
{{- range $name, $tier := $tiers -}}
{{- range $key := list "path" "precision" -}}
{{- if not (index $tier $key) }}{{ fail (printf "tiers.%s.%s is needed" $name $key) }}{{ end -}}
{{- end -}}
{{- if and $v.checkpoints.prepare.enabled (ne $tier.path $name) }}{{ fail (printf "tiers.%s.path: 'qarr model prepare' makes /models/%s; leave it at that" $name $name) }}{{ end -}}
{{- if and $tier.checkpoint (not $v.checkpoints.prepare.enabled) }}{{ fail (printf "tiers.%s.checkpoint: only checkpoints.prepare fetches it; enable that, or put the checkpoint into %s on the volume" $name $tier.path) }}{{ end -}}
{{- if gt (int $tier.minReplicas) (int $tier.maxReplicas) }}{{ fail (printf "tiers.%s: minReplicas is above maxReplicas" $name) }}{{ end -}}
{{- range $arg := $tier.extraArgs -}}
{{- if has (index (splitList "=" $arg) 0) (list "--model" "--served-model-name" "--host" "--port" "--api-key" "--max-model-len" "--max-num-seqs" "--tensor-parallel-size" "--gpu-memory-utilization" "--scheduling-policy" "--shutdown-timeout" "--kv-transfer-config" "--otlp-traces-endpoint" "--enable-prefix-caching" "--no-enable-prefix-caching") -}}
{{- fail (printf "tiers.%s.extraArgs: %s is the chart's own; it has a value for it" $name $arg) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $v.autoscaling.enabled (not $v.autoscaling.prometheusUrl) }}{{ fail "autoscaling.prometheusUrl is needed, as in http://prometheus-operated.monitoring:9090" }}{{ end -}}
{{- if and $v.lmcache.enabled (not $v.lmcache.remoteUrl) }}{{ fail "lmcache.remoteUrl is needed, as in lm://lmcache-server:65432" }}{{ end -}}
{{- if and $v.ingress.enabled (not $v.ingress.host) }}{{ fail "ingress.host is needed" }}{{ end -}}
{{- if dig "engine" "api_key" "" $v.router.settings }}{{ fail "router.settings.engine.api_key: settings are in a ConfigMap; engineKey keeps it in a Secret" }}{{ end -}}
{{- if dig "state" "redis_url" "" $v.router.settings }}{{ fail "router.settings.state.redis_url: settings are in a ConfigMap; redis keeps it in a Secret" }}{{ end -}}
{{- if and $v.monitoring.serviceMonitor.enabled (not $v.auth.allowKeyless) (not $v.monitoring.keySecret) }}{{ fail "monitoring.keySecret is needed: /metrics needs a key like other requests ('qarr keys add prometheus')" }}{{ end -}}
{{- end -}}
