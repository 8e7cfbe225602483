{{/* Owns names, labels and the image reference. */}}

{{- define "kjtserve.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 42 | trimSuffix "-" -}}
{{- end -}}

{{/*
Prefix of every object's name. 42 characters, so that a StatefulSet `<prefix>-shard-999` stays within 52: Kubernetes
appends 11 to it in a pod's controller-revision-hash label. A Service's name is a DNS-1035 label: no dot, and a letter
first, both of which a release's name may break.
*/}}
{{- define "kjtserve.fullname" -}}
{{- $name := include "kjtserve.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- $full = default $full .Values.fullnameOverride | replace "." "-" -}}
{{- if regexMatch "^[0-9]" $full -}}{{- $full = printf "k-%s" $full -}}{{- end -}}
{{- $full | trunc 42 | trimSuffix "-" -}}
{{- end -}}

{{- define "kjtserve.frontName" -}}
{{- printf "%s-front" (include "kjtserve.fullname" .) -}}
{{- end -}}

{{/* Takes a dict of `root` and `shard`. */}}
{{- define "kjtserve.shardName" -}}
{{- printf "%s-shard-%d" (include "kjtserve.fullname" .root) (int .shard) -}}
{{- end -}}

{{- define "kjtserve.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kjtserve.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* What selects pods; must never change between releases of the chart. */}}
{{- define "kjtserve.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kjtserve.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "kjtserve.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" | quote }}
{{ include "kjtserve.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: kjtserve
{{- end -}}

{{- define "kjtserve.frontSelectorLabels" -}}
{{ include "kjtserve.selectorLabels" . }}
app.kubernetes.io/component: front
{{- end -}}

{{- define "kjtserve.frontLabels" -}}
{{ include "kjtserve.labels" . }}
app.kubernetes.io/component: front
{{- end -}}

{{/* The labels of a shard take a dict of `root` and `shard`. */}}
{{- define "kjtserve.shardSelectorLabels" -}}
{{ include "kjtserve.selectorLabels" .root }}
app.kubernetes.io/component: shard
kjtserve/shard: {{ .shard | quote }}
{{- end -}}

{{- define "kjtserve.shardLabels" -}}
{{ include "kjtserve.labels" .root }}
app.kubernetes.io/component: shard
kjtserve/shard: {{ .shard | quote }}
{{- end -}}

{{- define "kjtserve.image" -}}
{{- $repository := .Values.image.repository -}}
{{- if .Values.image.registry -}}{{- $repository = printf "%s/%s" .Values.image.registry $repository -}}{{- end -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" $repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}
