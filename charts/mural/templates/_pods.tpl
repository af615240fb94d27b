{{/* What the pods of all components have alike. */}}

{{/* (dict "root" $ "component" "server" "token" false) */}}
{{- define "mural.podSpec" -}}
{{- $values := index .root.Values .component -}}
serviceAccountName: {{ include "mural.serviceAccountName" . }}
automountServiceAccountToken: {{ .token }}
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .root.Values.topologySpread.enabled }}
topologySpreadConstraints:
  - maxSkew: {{ .root.Values.topologySpread.maxSkew }}
    topologyKey: {{ .root.Values.topologySpread.topologyKey }}
    whenUnsatisfiable: {{ .root.Values.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "mural.selector" . | nindent 8 }}
    # Each revision by itself, so that a rollout ends spread, too.
    matchLabelKeys: [{{ if eq .component "server" }}controller-revision-hash{{ else }}pod-template-hash{{ end }}]
{{- end }}
{{- end -}}

{{/* Labels of a component's pods, its own values' included. (dict "root" $ "component" "server") */}}
{{- define "mural.podLabels" -}}
{{ include "mural.labels" . }}
{{- with (index .root.Values .component).podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Image and confinement of a component's container. (dict "root" $ "component" "server") */}}
{{- define "mural.container" -}}
image: {{ include "mural.image" (dict "root" .root "image" (index .root.Values .component).image) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- toYaml .root.Values.containerSecurityContext | nindent 2 }}
{{- end -}}

{{/* More arguments, each in quotes. */}}
{{- define "mural.extraArgs" -}}
{{- range .extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "mural.envFrom" -}}
{{- range .secrets }}
- secretRef:
    name: {{ . }}
{{- end }}
{{- with .more }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "component" "server"); nothing where it is off. */}}
{{- define "mural.podDisruptionBudget" -}}
{{- $budget := (index .root.Values .component).podDisruptionBudget -}}
{{- if $budget.enabled }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "mural.fullname" .root }}-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "mural.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ $budget.maxUnavailable }}
  # A pod that is not ready protects nobody, and would only hold up a drain.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "mural.selector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "component" "server"); nothing where somebody else makes it. */}}
{{- define "mural.serviceAccount" -}}
{{- $account := (index .root.Values .component).serviceAccount -}}
{{- if $account.create }}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "mural.serviceAccountName" . }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "mural.labels" . | nindent 4 }}
  {{- with $account.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}
{{- end -}}
