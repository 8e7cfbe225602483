{{/* Owns what the pods of both tiers share: who they run as, where the models lie, how memory is counted. */}}

{{- define "kjtserve.podIdentity" -}}
serviceAccountName: {{ include "kjtserve.serviceAccountName" . | quote }}
automountServiceAccountToken: false
# A Service called kjtserve-x would put KJTSERVE_X_PORT beside the settings of the same prefix.
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int64 .Values.podSecurityContext.runAsUser }}
  runAsGroup: {{ int64 .Values.podSecurityContext.runAsGroup }}
  fsGroup: {{ int64 .Values.podSecurityContext.fsGroup }}
  # A repository of many files is not walked on every start.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "kjtserve.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
privileged: false
capabilities:
  drop:
    - ALL
{{- end -}}

{{/* Programs that want a home or a cache find /tmp, the one place on disk that they can write. */}}
{{- define "kjtserve.env" -}}
- name: HOME
  value: /tmp
- name: PYTHONDONTWRITEBYTECODE
  value: "1"
{{- end -}}

{{- define "kjtserve.volumeMounts" -}}
- name: models
  mountPath: {{ .Values.models.mountPath }}
  readOnly: true
  {{- with .Values.models.subPath }}
  subPath: {{ . | quote }}
  {{- end }}
- name: tmp
  mountPath: /tmp
{{- end -}}

{{- define "kjtserve.volumes" -}}
- name: models
  {{- if eq .Values.models.source "persistentVolumeClaim" }}
  persistentVolumeClaim:
    claimName: {{ .Values.models.claimName | quote }}
    readOnly: true
  {{- else }}
  emptyDir: {}
  {{- end }}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
{{- end -}}

{{/* nodeSelector and tolerations of a tier; takes the tier's values. */}}
{{- define "kjtserve.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Whole mebibytes of a quantity in Mi or Gi. */}}
{{- define "kjtserve.mebibytes" -}}
{{- if hasSuffix "Gi" . -}}{{- mul (trimSuffix "Gi" . | int64) 1024 -}}{{- else -}}{{- trimSuffix "Mi" . | int64 -}}{{- end -}}
{{- end -}}

{{/* A tier's resources; takes a dict of `resources` and `shmSize`, the memory that /dev/shm takes on top of them. */}}
{{- define "kjtserve.resources" -}}
{{- $shmMi := include "kjtserve.mebibytes" .shmSize | int64 -}}
{{- range $kind := list "requests" "limits" }}
{{- $given := index $.resources $kind }}
{{ $kind }}:
  {{- with $given.cpu }}
  cpu: {{ . | toString | quote }}
  {{- end }}
  memory: {{ add (include "kjtserve.mebibytes" $given.memory | int64) $shmMi }}Mi
{{- end }}
{{- end -}}

{{/* periodSeconds, timeoutSeconds and failureThreshold of a probe. */}}
{{- define "kjtserve.probeTimes" -}}
periodSeconds: {{ int .periodSeconds }}
timeoutSeconds: {{ int .timeoutSeconds }}
failureThreshold: {{ int .failureThreshold }}
{{- end -}}
