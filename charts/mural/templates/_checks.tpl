{{/* What the schema cannot say in a sentence, or sees only together. */}}
{{- define "mural.check" -}}
{{- $v := .Values -}}
{{- if eq $v.engine "mural" -}}
{{- if $v.model.quantization -}}
{{- fail (printf "model.quantization is %q, but Mural's engine reads no quantised safetensors: set engine: vllm, or leave model.quantization empty (a .gguf file says by itself how it is stored)." $v.model.quantization) -}}
{{- end -}}
{{- if or $v.server.gpu.count $v.server.gpu.tensorParallelSize $v.server.gpu.memoryUtilization -}}
{{- fail "server.gpu is set, but Mural's engine computes on CPUs: set engine: vllm, or server.gpu.count: 0 and no other setting of server.gpu." -}}
{{- end -}}
{{- else -}}
{{- if not $v.model.path -}}
{{- fail "engine: vllm needs model.path: the name of a repository on a hub, or a folder of model.volume." -}}
{{- end -}}
{{- if not $v.sources.resolvers -}}
{{- fail "engine: vllm needs sources.resolvers: adapters come to vLLM through Mural's plug-in alone." -}}
{{- end -}}
{{- if $v.server.tls.existingSecret -}}
{{- fail "server.tls is of Mural's engine: the operator speaks plain HTTP with vLLM pods; leave server.tls.existingSecret empty." -}}
{{- end -}}
{{- if $v.uploads.enabled -}}
{{- fail "uploads.enabled is set, but vLLM takes no uploads: set engine: mural, or let tenants publish with `mural adapters push`." -}}
{{- end -}}
{{- range $name := list "maxCpuLoraBytes" -}}
{{- if index $v.server.lora $name -}}
{{- fail (printf "server.lora.%s is of Mural's engine: leave it empty under engine: vllm." $name) -}}
{{- end -}}
{{- end -}}
{{- if $v.server.lora.targetModules -}}
{{- fail "server.lora.targetModules is of Mural's engine: leave it empty under engine: vllm." -}}
{{- end -}}
{{- range $name := list "kvCacheMemoryBytes" "cpuThreads" -}}
{{- if index $v.server $name -}}
{{- fail (printf "server.%s is of Mural's engine: leave it out under engine: vllm." $name) -}}
{{- end -}}
{{- end -}}
{{- if not (has (int $v.server.lora.maxLoraRank) (list 1 8 16 32 64 128 256 320 512)) -}}
{{- fail (printf "server.lora.maxLoraRank is %d, but vLLM takes 1, 8, 16, 32, 64, 128, 256, 320 or 512." (int $v.server.lora.maxLoraRank)) -}}
{{- end -}}
{{- end -}}
{{- if and $v.uploads.enabled (not $v.uploads.store) -}}
{{- fail "uploads.enabled needs uploads.store: where they are published, so that every replica finds them." -}}
{{- end -}}
{{- if gt (int $v.server.lora.maxLoras) (int $v.server.lora.maxCpuLoras) -}}
{{- fail "server.lora.maxLoras is above server.lora.maxCpuLoras: an adapter in a slot is in host memory, too." -}}
{{- end -}}
{{- if and (eq $v.server.cache.type "hostPath") (not $v.server.cache.hostPath) -}}
{{- fail "server.cache.type is hostPath: say which folder of the nodes in server.cache.hostPath." -}}
{{- end -}}
{{- if and (eq $v.redis.mode "external") (not $v.redis.external.existingSecret) -}}
{{- fail "redis.mode is external: name the Secret with its URL in redis.external.existingSecret." -}}
{{- end -}}
{{- if and (ne $v.redis.mode "external") $v.redis.external.existingSecret -}}
{{- fail (printf "redis.external.existingSecret is set, but redis.mode is %s: set redis.mode: external." $v.redis.mode) -}}
{{- end -}}
{{- if and $v.gateway.enabled (eq $v.gateway.via "picker") $v.server.tls.existingSecret -}}
{{- fail "gateway.via is picker, but gateways reach the pods of an InferencePool in plain HTTP: leave server.tls.existingSecret empty, or set gateway.via: router." -}}
{{- end -}}
{{- if and $v.gateway.enabled (not $v.gateway.parentRefs) -}}
{{- fail "gateway.enabled needs gateway.parentRefs: which Gateway shall carry the route." -}}
{{- end -}}
{{- if and (eq $v.router.auth "open") $v.router.adminKey.existingSecret -}}
{{- fail "router.auth is open, but router.adminKey is given: leave one of them out." -}}
{{- end -}}
{{- if and $v.gateway.enabled (eq $v.gateway.via "picker") (eq $v.router.auth "open") -}}
{{- fail "gateway.via is picker under router.auth: open: everybody who reaches the gateway would be served; set router.auth: keys." -}}
{{- end -}}
{{- if and (not $v.operator.enabled) (not $v.router.keysSecret) -}}
{{- fail "operator.enabled is false: name the Secret of key hashes that the other release's operator writes in router.keysSecret." -}}
{{- end -}}
{{- if and $v.operator.enabled $v.router.keysSecret -}}
{{- fail "router.keysSecret is set, but this release has an operator of its own, which writes its own Secret: leave router.keysSecret empty, or set operator.enabled: false." -}}
{{- end -}}
{{- if $v.operator.enabled -}}
{{- range (lookup "apps/v1" "Deployment" .Release.Namespace "").items -}}
{{- $labels := default dict .metadata.labels -}}
{{- $other := index $labels "app.kubernetes.io/instance" -}}
{{- if and (eq (default "" (index $labels "app.kubernetes.io/part-of")) "mural") (eq (default "" (index $labels "app.kubernetes.io/component")) "operator") (ne $other $.Release.Name) -}}
{{- $keys := printf "%s-router-keys" (trimSuffix "-operator" .metadata.name) -}}
{{- fail (printf "the release %s has an operator in the namespace %s already, and two would undo each other's work: set operator.enabled: false, router.keysSecret: %s and another pool.name, or install into another namespace." $other $.Release.Namespace $keys) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $component := list "server" "router" "operator" -}}
{{- $account := (index $v $component).serviceAccount -}}
{{- if and (not $account.create) (not $account.name) -}}
{{- fail (printf "%s.serviceAccount.create is false: name the one to use in %s.serviceAccount.name." $component $component) -}}
{{- end -}}
{{- end -}}
{{- end -}}
