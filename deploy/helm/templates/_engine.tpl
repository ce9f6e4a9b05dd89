{{/* vLLM's arguments: (list root engine). */}}
{{- define "qarr.engineArgs" -}}
{{- $root := index . 0 -}}
{{- $engine := index . 1 -}}
- --host=0.0.0.0
- --port=8000
- --scheduling-policy=priority
- --disable-uvicorn-access-log
# The folder's name tells tiers apart in LMCache, whose keys have it.
- --model=/models/{{ $engine.path }}
- --served-model-name={{ $root.Values.model.name }}
- --max-model-len={{ int $engine.maxModelLen }}
- --max-num-seqs={{ int $engine.maxNumSeqs }}
- --shutdown-timeout={{ int $engine.drainSeconds }}
- {{ if $engine.prefixCaching }}--enable-prefix-caching{{ else }}--no-enable-prefix-caching{{ end }}
{{- if int $engine.gpus }}
- --gpu-memory-utilization={{ $engine.gpuMemoryUtilization }}
{{- if gt (int $engine.gpus) 1 }}
- --tensor-parallel-size={{ int $engine.gpus }}
{{- end }}
{{- else }}
- --enforce-eager
- --distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor
{{- end }}
{{- with $root.Values.model.toolParser }}
- --enable-auto-tool-choice
- --tool-call-parser={{ . }}
# Arguments follow their schema also where callers do not set "strict", as SDKs do not.
- --tool-strict-level=parameter
{{- end }}
{{- with $root.Values.model.reasoningParser }}
- --reasoning-parser={{ . }}
{{- end }}
{{- if $root.Values.lmcache.enabled }}
- '--kv-transfer-config={"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'
{{- end }}
{{- with $root.Values.tracing.endpoint }}
- --otlp-traces-endpoint={{ . }}
{{- end }}
{{- range $engine.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* vLLM's variables: (list root tier engine). */}}
{{- define "qarr.engineEnv" -}}
{{- $root := index . 0 -}}
{{- $engine := index . 2 -}}
- name: VLLM_API_KEY
  valueFrom: {secretKeyRef: {name: {{ include "qarr.engineKeySecret" $root }}, key: api-key}}
- {name: TOKENIZERS_PARALLELISM, value: "false"}
{{- if not (int $engine.gpus) }}
- {name: VLLM_CPU_KVCACHE_SPACE, value: {{ int $engine.cpuKvCacheGiB | quote }}}
- {name: VLLM_CPU_OMP_THREADS_BIND, value: nobind}
- {name: OMP_NUM_THREADS, value: {{ int $engine.cpuThreads | quote }}}
{{- end }}
{{- with $root.Values.lmcache }}
{{- if .enabled }}
- {name: LMCACHE_REMOTE_URL, value: {{ .remoteUrl | quote }}}
- {name: LMCACHE_REMOTE_SERDE, value: naive}
- {name: LMCACHE_CHUNK_SIZE, value: {{ int .chunkSize | quote }}}
- {name: LMCACHE_LOCAL_CPU, value: "True"}
- {name: LMCACHE_MAX_LOCAL_CPU_SIZE, value: {{ .cpuGiB | quote }}}
{{- end }}
{{- end }}
{{- with $root.Values.tracing.endpoint }}
- {name: OTEL_SERVICE_NAME, value: vllm-{{ index $ 1 }}}
- {name: OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, value: grpc}
- {name: OTEL_EXPORTER_OTLP_TRACES_INSECURE, value: {{ hasPrefix "http://" . | quote }}}
{{- end }}
{{- range $key, $value := $engine.env }}
- {name: {{ $key }}, value: {{ $value | quote }}}
{{- end }}
{{- end -}}

{{/* Makes the checkpoints on the volume where they are missing, and names them as tiers do: (list root engine). */}}
{{- define "qarr.prepare" -}}
{{- $root := index . 0 -}}
{{- $prepare := $root.Values.checkpoints.prepare -}}
- name: prepare
  image: {{ include "qarr.image" (list $root $root.Values.image.prepare) }}
  imagePullPolicy: {{ $root.Values.image.prepare.pullPolicy }}
  # Pods that start together wait for one another. A link appears when its checkpoint is complete.
  command:
    - sh
    - -euc
    - |
      qarr model prepare "$@" > /tmp/made
      while read -r tier path; do
        [ -e "/models/$tier" ] || ln -sfn "$path" "/models/$tier"
      done < /tmp/made
    - prepare
    {{- with $prepare.model }}
    - --model
    - {{ . | quote }}
    {{- end }}
    {{- range $prepare.args }}
    - {{ . | quote }}
    {{- end }}
  env:
    - {name: QARR_MODEL__STORE, value: /models/store}
    {{- range $name, $tier := include "qarr.tiers" $root | fromYaml }}
    {{- with $tier.checkpoint }}
    - {name: QARR_TIERS__{{ $name | upper }}__CHECKPOINT, value: {{ . | quote }}}
    {{- end }}
    {{- end }}
    {{- with $prepare.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources: {{- toYaml $prepare.resources | nindent 4 }}
  securityContext: {{- include "qarr.containerSecurity" $root | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
    - {name: cache, mountPath: /var/cache/qarr}
{{- end -}}
