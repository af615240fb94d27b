{{/* What a component may do, by where. */}}

{{/* Which namespaces' Adapters count, for router and operator alike. */}}
{{- define "mural.watchArgs" -}}
{{- if .Values.operator.allNamespaces }}
- --all-namespaces
{{- else }}
{{- $others := include "mural.otherNamespaces" . | fromJsonArray }}
{{- if $others }}
- --watch-namespace={{ .Release.Namespace }}
{{- range $others }}
- --watch-namespace={{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A router in the release's namespace. */}}
{{- define "mural.routerRules" -}}
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
- apiGroups: [mural.dev]
  resources: [tenants]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [{{ include "mural.routerKeysSecret" . }}]
  verbs: [list, watch]
{{- end -}}

{{/* A router in each namespace that is watched. */}}
{{- define "mural.routerWatchRules" -}}
- apiGroups: [mural.dev]
  resources: [adapters, adapteraliases]
  verbs: [list, watch]
{{- end -}}

{{/* Secrets of the release that the operator reads. A JSON list. */}}
{{- define "mural.ownSecrets" -}}
{{- $tokens := ternary (list (include "mural.vllmKeySecret" .)) (list (include "mural.controlTokenSecret" .) .Values.server.tls.existingSecret) (eq .Values.engine "vllm") -}}
{{- compact (concat (list (include "mural.routerKeysSecret" .)) $tokens) | toJson -}}
{{- end -}}

{{/* The operator in the release's namespace. */}}
{{- define "mural.operatorRules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# Tenants' keys and pools' tokens are in Secrets that their objects name; none is listed.
- apiGroups: [""]
  resources: [secrets]
  {{- with .Values.operator.secretNames }}
  resourceNames:
    {{- range uniq (concat . (include "mural.ownSecrets" $ | fromJsonArray)) }}
    - {{ . }}
    {{- end }}
  {{- end }}
  verbs: [get]
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [{{ include "mural.routerKeysSecret" . }}]
  verbs: [patch]
- apiGroups: [mural.dev]
  resources: [servingpools, tenants]
  verbs: [get, list, watch]
- apiGroups: [mural.dev]
  resources: [servingpools/status, tenants/status]
  verbs: [patch]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "mural.fullname" . }}-operator]
  verbs: [get, update]
{{- end -}}

{{/* The operator in each namespace that is watched. Patching an Adapter is for its finalizer. */}}
{{- define "mural.operatorWatchRules" -}}
- apiGroups: [mural.dev]
  resources: [adapters]
  verbs: [get, list, watch, patch]
- apiGroups: [mural.dev]
  resources: [adapteraliases]
  verbs: [get, list, watch]
- apiGroups: [mural.dev]
  resources: [adapters/status, adapteraliases/status]
  verbs: [patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{/* One role and its binding. (dict "root" $ "component" C "name" N "rules" TEXT "namespace" NS or "" for a ClusterRole, "account" A, "annotations" DICT) */}}
{{- define "mural.role" -}}
{{- $kind := ternary "ClusterRole" "Role" (empty .namespace) }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- include "mural.labels" . | nindent 4 }}
  {{- with .annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
rules:
  {{- .rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $kind }}Binding
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- include "mural.labels" . | nindent 4 }}
  {{- with .annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ $kind }}
  name: {{ .name }}
subjects:
  - kind: ServiceAccount
    name: {{ .account }}
    namespace: {{ .root.Release.Namespace }}
{{- end -}}

{{/* Roles of a component: its own namespace, and what is watched. (dict "root" $ "component" C "rules" TEXT "watch" TEXT) */}}
{{- define "mural.roles" -}}
{{- $root := .root -}}
{{- $release := $root.Release.Namespace -}}
{{- $name := printf "%s-%s" (include "mural.fullname" $root) .component -}}
{{- $role := dict "root" $root "component" .component "account" (include "mural.serviceAccountName" .) -}}
{{- if $root.Values.operator.allNamespaces -}}
{{- include "mural.role" (merge (dict "name" $name "namespace" $release "rules" .rules) $role) }}
{{- include "mural.role" (merge (dict "name" (printf "%s-%s" $release $name) "namespace" "" "rules" .watch) $role) }}
{{- else -}}
{{- include "mural.role" (merge (dict "name" $name "namespace" $release "rules" (printf "%s\n%s" .rules .watch)) $role) }}
{{- range include "mural.otherNamespaces" $root | fromJsonArray }}
{{- include "mural.role" (merge (dict "name" (printf "%s-%s" $release $name) "namespace" . "rules" $.watch) $role) }}
{{- end }}
{{- end -}}
{{- end -}}
