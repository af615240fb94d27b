{{/* The two engines' containers: arguments, environment, ports, probes. */}}

{{- define "mural.serverContainer" -}}
{{- $server := .Values.server -}}
{{- $lora := $server.lora -}}
{{- $scheme := ternary ", scheme: HTTPS" "" (not (empty $server.tls.existingSecret)) -}}
args:
  - serve
  {{- with .Values.model.path }}
  - {{ . | quote }}
  {{- end }}
  {{- with .Values.model.servedNames }}
  - --served-model-name
  {{- range . }}
  - {{ . | quote }}
  {{- end }}
  {{- end }}
  - --host={{ .Values.listenAddress }}
  - --port=8000
  - --control-host={{ .Values.listenAddress }}
  - --control-port=8001
  - --control-token-file=/run/secrets/mural/control-token
  {{- if $server.tls.existingSecret }}
  - --ssl-certfile=/run/secrets/mural-tls/tls.crt
  - --ssl-keyfile=/run/secrets/mural-tls/tls.key
  {{- end }}
  - --auth=router
  - --router-token-file=/run/secrets/mural/router-token
  - --dtype={{ $server.dtype }}
  - --max-num-seqs={{ $server.maxNumSeqs }}
  {{- with $server.maxNumBatchedTokens }}
  - --max-num-batched-tokens={{ . }}
  {{- end }}
  {{- with $server.maxModelLen }}
  - --max-model-len={{ . }}
  {{- end }}
  {{- with $server.kvCacheMemoryBytes }}
  - --kv-cache-memory-bytes={{ . }}
  {{- end }}
  {{- with $server.cpuThreads }}
  - --cpu-threads={{ . }}
  {{- end }}
  - --max-loras={{ $lora.maxLoras }}
  - --max-cpu-loras={{ $lora.maxCpuLoras }}
  {{- with $lora.maxCpuLoraBytes }}
  - --max-cpu-lora-bytes={{ . }}
  {{- end }}
  - --max-lora-rank={{ $lora.maxLoraRank }}
  {{- with $lora.targetModules }}
  - --lora-target-modules
  {{- range . }}
  - {{ . | quote }}
  {{- end }}
  {{- end }}
  - --adapter-sources=/etc/mural/sources/sources.yaml
  - --adapter-wait-s={{ $server.adapterWaitSeconds }}
  - --queue-wait-s={{ $server.queueWaitSeconds }}
  - --await-declared={{ $server.awaitDeclaredSeconds }}
  - --shutdown-grace-s={{ $server.shutdownGraceSeconds }}
  - --log-level={{ $server.logLevel }}
  {{- if .Values.uploads.enabled }}
  - --upload-store={{ .Values.uploads.store }}
  - --upload-ttl-s={{ int64 .Values.uploads.ttlSeconds }}
  - --upload-max-bytes={{ .Values.uploads.maxBytes }}
  - --upload-quota-adapters={{ .Values.uploads.quotaAdapters }}
  - --upload-quota-bytes={{ .Values.uploads.quotaBytes }}
  {{- end }}
  {{- include "mural.extraArgs" $server | nindent 2 }}
env:
  - name: HOME
    value: /tmp
  {{- with $server.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- include "mural.serverEnvFrom" . }}
ports:
  - {name: http, containerPort: 8000}
  - {name: control, containerPort: 8001}
startupProbe:
  httpGet: {path: /health, port: control{{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div (add $server.startupSeconds 4) 5 }}
readinessProbe:
  httpGet: {path: /ready, port: control{{ $scheme }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /health, port: control{{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
lifecycle:
  preStop:
    sleep: {seconds: {{ $server.preStopSeconds }}}
{{- end -}}

{{- define "mural.vllmContainer" -}}
{{- $server := .Values.server -}}
{{- $lora := $server.lora -}}
{{- $gpu := $server.gpu -}}
# In place of the image's entry point, which differs between vLLM's images.
command: [vllm]
args:
  - serve
  - {{ .Values.model.path | quote }}
  {{- with .Values.model.servedNames }}
  - --served-model-name
  {{- range . }}
  - {{ . | quote }}
  {{- end }}
  {{- end }}
  - --host={{ .Values.listenAddress }}
  - --port=8000
  - --dtype={{ $server.dtype }}
  {{- with .Values.model.quantization }}
  - --quantization={{ . }}
  {{- end }}
  - --max-num-seqs={{ $server.maxNumSeqs }}
  {{- with $server.maxNumBatchedTokens }}
  - --max-num-batched-tokens={{ . }}
  {{- end }}
  {{- with $server.maxModelLen }}
  - --max-model-len={{ . }}
  {{- end }}
  - --enable-lora
  - --max-loras={{ $lora.maxLoras }}
  - --max-cpu-loras={{ $lora.maxCpuLoras }}
  - --max-lora-rank={{ $lora.maxLoraRank }}
  {{- with default $gpu.count $gpu.tensorParallelSize }}
  - --tensor-parallel-size={{ . }}
  {{- end }}
  {{- with $gpu.memoryUtilization }}
  - --gpu-memory-utilization={{ . }}
  {{- end }}
  # Without it vLLM cuts at the signal what is in flight.
  - --shutdown-timeout={{ $server.shutdownGraceSeconds }}
  {{- include "mural.extraArgs" $server | nindent 2 }}
env:
  - name: HOME
    value: /tmp
  # The image's list of users does not know this one.
  - name: USER
    value: mural
  - name: VLLM_ALLOW_RUNTIME_LORA_UPDATING
    value: "1"
  - name: MURAL_SOURCES
    value: /etc/mural/sources/sources.yaml
  - name: MURAL_VLLM_GRANTS
    value: {{ $server.vllm.grants | quote }}
  - name: VLLM_API_KEY
    valueFrom:
      secretKeyRef:
        name: {{ include "mural.vllmKeySecret" . }}
        key: {{ $server.vllm.secretKey }}
  {{- with $server.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- include "mural.serverEnvFrom" . }}
ports:
  - {name: http, containerPort: 8000}
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div (add $server.startupSeconds 4) 5 }}
readinessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
lifecycle:
  preStop:
    sleep: {seconds: {{ $server.preStopSeconds }}}
{{- end -}}

{{- define "mural.serverEnvFrom" -}}
{{- $secrets := compact (list .Values.sources.credentialsSecret) -}}
{{- if or $secrets .Values.server.extraEnvFrom }}
envFrom:
  {{- include "mural.envFrom" (dict "secrets" $secrets "more" .Values.server.extraEnvFrom) | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The file of sources, as `mural serve --adapter-sources` and the plug-in read it. */}}
{{- define "mural.sources" -}}
cache:
  path: /var/cache/mural/adapters
  quota: {{ .Values.server.cache.quota | quote }}
  verify: {{ .Values.sources.verify }}
resolvers:
  {{- if .Values.sources.resolvers }}
  {{- toYaml .Values.sources.resolvers | nindent 2 }}
  {{- else }} []
  {{- end }}
{{- with .Values.sources.fetch }}
fetch:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
