{{/* Name of the release's objects: the release name, with the chart's where that says more. */}}
{{- define "highwater.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select the pods of a component. Takes (list root component). */}}
{{- define "highwater.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of an object of a component. Takes (list root component). */}}
{{- define "highwater.labels" -}}
{{- $root := index . 0 -}}
{{ include "highwater.selector" . }}
app.kubernetes.io/part-of: highwater
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Service account of a component. Takes (list root component). */}}
{{- define "highwater.serviceAccountName" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $account := (index $root.Values $component).serviceAccount -}}
{{- if $account.name -}}
{{- $account.name -}}
{{- else if $account.create -}}
{{- printf "%s-%s" (include "highwater.fullname" $root) $component -}}
{{- else -}}
default
{{- end -}}
{{- end -}}

{{/* Image of a component. Takes (list root component). */}}
{{- define "highwater.image" -}}
{{- $root := index . 0 -}}
{{- $image := $root.Values.image -}}
{{- $path := compact (list $image.registry $image.repository (index . 1)) | join "/" -}}
{{- printf "%s:%s" $path ($image.tag | default $root.Chart.AppVersion) -}}
{{- end -}}
