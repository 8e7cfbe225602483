{{/* Owns what only shards need; every define takes a dict of `root` and `shard`. */}}

{{/* Names of the Triton models of one shard, one a line. */}}
{{- define "kjtserve.shardModels" -}}
{{- range .root.Values.collections }}
{{ printf "%s_shard_%d" . (int $.shard) }}
{{- end }}
{{- end -}}

{{/* An exec probe that asks `question` (live or ready); its own timeout ends a second before the kubelet's. */}}
{{- define "kjtserve.shardProbe" -}}
exec:
  command:
    - python3
    - -m
    - model_repo.probe
    - {{ .question }}
    - --http=127.0.0.1:8000
    - --repo={{ .root.Values.models.mountPath }}
    - --timeout-s={{ sub (int .timeoutSeconds) 1 }}
    {{- range include "kjtserve.shardModels" . | trim | splitList "\n" }}
    - {{ . }}
    {{- end }}
{{- end -}}

{{/* Periods that a start may take. */}}
{{- define "kjtserve.shardStartupThreshold" -}}
{{- $startup := .root.Values.shards.startup -}}
{{- $seconds := addf $startup.baseSeconds (divf (mulf $startup.artifactGiB 1024) $startup.readMiBPerSecond) -}}
{{- divf $seconds $startup.periodSeconds | ceil | int -}}
{{- end -}}
