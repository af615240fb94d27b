{{/* Names and labels. */}}

{{- define "mural.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 42 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 42 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 42 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What tells a component's pods from others': never changes over an object's life. (dict "root" $ "component" "server") */}}
{{- define "mural.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of an object. */}}
{{- define "mural.labels" -}}
{{ include "mural.selector" . }}
app.kubernetes.io/part-of: mural
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "mural.poolName" -}}
{{- default "default" .Values.pool.name -}}
{{- end -}}

{{/* The pool's mark on its pods, which its ServingPool selects. */}}
{{- define "mural.poolLabels" -}}
mural.dev/pool: {{ include "mural.poolName" . }}
{{- end -}}

{{/* (dict "root" $ "component" "server") */}}
{{- define "mural.serviceAccountName" -}}
{{- $account := (index .root.Values .component).serviceAccount -}}
{{- $own := printf "%s-%s" (include "mural.fullname" .root) .component -}}
{{- if $account.create -}}{{ default $own $account.name }}{{- else -}}{{ $account.name }}{{- end -}}
{{- end -}}

{{/* (dict "root" $ "image" .Values.server.image) */}}
{{- define "mural.image" -}}
{{- $repository := .image.repository -}}
{{- if .root.Values.image.registry -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .root.Values.image.registry) $repository -}}
{{- end -}}
{{- $repository -}}:{{- default .root.Chart.AppVersion .image.tag -}}
{{- with .image.digest -}}@{{ . }}{{- end -}}
{{- end -}}

{{- define "mural.routerTokenSecret" -}}
{{- default (printf "%s-router-token" (include "mural.fullname" .)) .Values.tokens.routerSecret -}}
{{- end -}}

{{- define "mural.controlTokenSecret" -}}
{{- default (printf "%s-control-token" (include "mural.fullname" .)) .Values.tokens.controlSecret -}}
{{- end -}}

{{/* What the servers' certificate is for. */}}
{{- define "mural.serverName" -}}
{{- default (printf "%s-server.%s.svc" (include "mural.fullname" .) .Release.Namespace) .Values.server.tls.serverName -}}
{{- end -}}

{{- define "mural.vllmKeySecret" -}}
{{- default (printf "%s-vllm-key" (include "mural.fullname" .)) .Values.server.vllm.existingSecret -}}
{{- end -}}

{{- define "mural.routerKeysSecret" -}}
{{- default (printf "%s-router-keys" (include "mural.fullname" .)) .Values.router.keysSecret -}}
{{- end -}}

{{- define "mural.redisSecret" -}}
{{- if eq .Values.redis.mode "external" -}}{{ .Values.redis.external.existingSecret }}
{{- else -}}{{ printf "%s-redis" (include "mural.fullname" .) }}
{{- end -}}
{{- end -}}

{{/* Namespaces beside the release's own, without doubles. A JSON list. */}}
{{- define "mural.otherNamespaces" -}}
{{- without (uniq .Values.operator.watchNamespaces) .Release.Namespace | toJson -}}
{{- end -}}

{{/* Whether any source lies beyond the cluster's network; "" is no. */}}
{{- define "mural.remoteSources" -}}
{{- range .Values.sources.resolvers -}}{{- if ne .type "directory" -}}yes{{- end -}}{{- end -}}
{{- if hasPrefix "s3:" .Values.uploads.store -}}yes{{- end -}}
{{- end -}}

{{/* What tells a component's pods from others' over all releases of the namespace. */}}
{{- define "mural.anySelector" -}}
app.kubernetes.io/part-of: mural
app.kubernetes.io/component: {{ . }}
{{- end -}}

{{/* A secret text of an earlier revision, else a new one. (dict "root" $ "name" SECRET "key" ENTRY) */}}
{{- define "mural.kept" -}}
{{- $old := lookup "v1" "Secret" .root.Release.Namespace .name -}}
{{- $data := dict -}}
{{- if $old -}}{{- $data = default (dict) $old.data -}}{{- end -}}
{{- if hasKey $data .key -}}{{ index $data .key | b64dec }}{{- else -}}{{ randAlphaNum 48 }}{{- end -}}
{{- end -}}
