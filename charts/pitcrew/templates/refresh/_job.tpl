{{/* The deadline in seconds. The schema lets only 90s, 45m and 2h through. */}}
{{- define "pitcrew.refresh.seconds" -}}
{{- $deadline := .Values.postInstallHooks.dra.deadline -}}
{{- $unit := get (dict "s" 1 "m" 60 "h" 3600) (regexFind "[smh]$" $deadline) -}}
{{- mul (regexFind "^[0-9]+" $deadline) $unit -}}
{{- end -}}

{{/* Three minutes more, in seconds: the pod is scheduled and pulls its image; the Job's own deadline, which says why, comes first. */}}
{{- define "pitcrew.refresh.activeSeconds" -}}
{{- add (include "pitcrew.refresh.seconds" .) 180 -}}
{{- end -}}

{{/* Two minutes more again, in minutes: what the deployer waits for, so that it hears how the Job ended. */}}
{{- define "pitcrew.refresh.releaseTimeout" -}}
{{- div (add (include "pitcrew.refresh.activeSeconds" .) 120 59) 60 -}}m
{{- end -}}

{{/* Helm, helmfile and Flux come to this chart after the GPU Operator's; Argo CD comes to both at once. */}}
{{- define "pitcrew.refresh.settle" -}}
{{- with .Values.postInstallHooks.dra -}}
{{- .settle | default (hasPrefix "argocd" .deployer | ternary "10m" "20s") -}}
{{- end -}}
{{- end -}}

{{/* What the Job depends on. It is in a plain ConfigMap, so that every deployer sees a new version as a difference. */}}
{{- define "pitcrew.refresh.trigger" -}}
{{- with .Values.postInstallHooks.dra -}}
operatorVersion: {{ .operatorVersion | quote }}
driverVersion: {{ .driverVersion | quote }}
revision: {{ .revision | quote }}
{{- end -}}
{{- end -}}

{{/* The spec of the Job, the same for every deployer. */}}
{{- define "pitcrew.refresh.spec" -}}
{{- $part := dict "context" . "component" "refresh" -}}
# A second try for an API server that was away for a moment. All tries together end before the release's timeout.
backoffLimit: 2
activeDeadlineSeconds: {{ include "pitcrew.refresh.activeSeconds" . }}
podFailurePolicy:
  rules:
    # Emptied off its node, as a driver upgrade may do: not its fault.
    - action: Ignore
      onPodConditions:
        - type: DisruptionTarget
    # 2 is a mistake in the values; another try would make it again.
    - action: FailJob
      onExitCodes:
        containerName: refresh-clients
        operator: In
        values: [2]
template:
  metadata:
    labels:
      {{- include "pitcrew.selector" $part | nindent 6 }}
  spec:
    # A pod that failed stays, and its log with it.
    restartPolicy: Never
    serviceAccountName: {{ include "pitcrew.fullname" . }}-refresh
    automountServiceAccountToken: true
    {{- include "pitcrew.pod" . | nindent 4 }}
    containers:
      - name: refresh-clients
        {{- include "pitcrew.container" . | nindent 8 }}
        args:
          - refresh-clients
          - --all-nodes
          - --deadline={{ .Values.postInstallHooks.dra.deadline }}
          - --settle={{ include "pitcrew.refresh.settle" . }}
        env:
          - name: OPERATOR_NAMESPACE
            valueFrom:
              fieldRef:
                fieldPath: metadata.namespace
        {{- with .Values.postInstallHooks.dra.resources }}
        resources:
          {{- toYaml . | nindent 10 }}
        {{- end }}
    # Away from the nodes whose drivers change, if there are others; else anywhere.
    affinity:
      nodeAffinity:
        preferredDuringSchedulingIgnoredDuringExecution:
          - weight: 100
            preference:
              matchExpressions:
                - key: nvidia.com/gpu.present
                  operator: DoesNotExist
    tolerations:
      - operator: Exists
{{- end -}}
