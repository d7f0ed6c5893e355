{{- define "canary.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* Of the engine's pods. A runbook takes a sick pod out of service by removing the first one. */}}
{{- define "canary.selector" -}}
app.kubernetes.io/name: llm-engine
app.kubernetes.io/instance: {{ include "canary.name" . }}
{{- end -}}

{{/* Of everything else. */}}
{{- define "canary.labels" -}}
app.kubernetes.io/name: kv-canary
app.kubernetes.io/instance: {{ include "canary.name" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- define "canary.image" -}}
{{ .Values.canary.image.repository }}:{{ .Values.canary.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "canary.hardened" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
