{{/*
The name of everything. 38 characters leave room for the longest ending, "-refresh-clients-" and eight digits of a
hash, within the 63 of a Job's name.
*/}}
{{- define "pitcrew.fullname" -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- default $name .Values.fullnameOverride | trunc 38 | trimSuffix "-" -}}
{{- end -}}

{{/* What names one part of one release, for ever. Called with a dict of context and component. */}}
{{- define "pitcrew.selector" -}}
app.kubernetes.io/name: {{ default .context.Chart.Name .context.Values.nameOverride | trunc 63 }}
app.kubernetes.io/instance: {{ .context.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* The labels of an object. Called with a dict of context and component. */}}
{{- define "pitcrew.labels" -}}
{{ include "pitcrew.selector" . }}
app.kubernetes.io/version: {{ .context.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .context.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .context.Chart.Name .context.Chart.Version | replace "+" "_" | trunc 63 }}
{{- end -}}

{{/* The image: by digest if there is one, else by tag. */}}
{{- define "pitcrew.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* Image and rights of a container. The image's own user is not root; OpenShift chooses another that is not. */}}
{{- define "pitcrew.container" -}}
image: {{ include "pitcrew.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
# The sentence with which it ended is in `kubectl describe pod`.
terminationMessagePolicy: FallbackToLogsOnError
{{- end -}}

{{/* Rights of a pod, and how its image is pulled. */}}
{{- define "pitcrew.pod" -}}
securityContext:
  runAsNonRoot: true
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}
