{{/* A pod of a hook, up to its arguments. (dict "root" $ "account" NAME) */}}
{{- define "mural.hookPod" -}}
{{- $operator := .root.Values.operator -}}
restartPolicy: Never
serviceAccountName: {{ .account }}
automountServiceAccountToken: true
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with $operator.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $operator.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: tmp
    emptyDir: {}
  {{- with $operator.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
containers:
  - name: hook
    {{- include "mural.container" (dict "root" .root "component" "operator") | nindent 4 }}
    env:
      - name: HOME
        value: /tmp
      {{- with $operator.extraEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    resources:
      requests: {cpu: 50m, memory: 64Mi}
      limits: {memory: 256Mi}
    volumeMounts:
      - name: tmp
        mountPath: /tmp
      {{- with $operator.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
{{- end -}}
