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

{{/* Whether the guard's volumes are served: "true", or empty. */}}
{{- define "highwater.guard" -}}
{{- if and .Values.keeper.enabled .Values.guard.enabled }}true{{ end -}}
{{- end -}}

{{/* The version of MutatingAdmissionPolicy to use; empty where the cluster serves none (below 1.36,
unless it was switched on), or where nothing is to be injected. */}}
{{- define "highwater.injectionVersion" -}}
{{- if and (include "highwater.guard" .) .Values.guard.inject -}}
{{- if .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy" -}}
v1
{{- else if .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy" -}}
v1beta1
{{- end -}}
{{- end -}}
{{- end -}}

{{/* CEL: whether the container of a variable asks for a GPU, as operator and agent see it. Takes the
variable's name. */}}
{{- define "highwater.asksForGpu" -}}
{{ . }}.?resources.?limits.orValue({}).exists(resource, resource.startsWith('nvidia.com/'))
{{- end -}}

{{/* CEL: the folders of a node that are Highwater's own, as list elements. */}}
{{- define "highwater.ownPaths" -}}
{{ squote .Values.agent.stateDir }}, {{ squote .Values.keeper.stateDir }}, {{ printf "%s/plugins/guard.highwater.dev" .Values.agent.kubeletRoot | squote }}
{{- end -}}

{{/* What the values of a former chart lack. `helm upgrade --reuse-values` brings those, and none of
today's defaults. What is false or empty by default need not be here: absent is the same. */}}
{{- define "highwater.newer" -}}
parts:
  keeper:
    enabled: true
    stateDir: /run/highwater-keeper
    updateStrategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 1, maxUnavailable: 0}}
    resources: {requests: {cpu: 10m, memory: 32Mi}, limits: {memory: 512Mi}}
    serviceAccount: {create: true}
  guard: {enabled: true, inject: true}
keys:
  agent: {evidence: true, hostMemory: true}
  keeper: {park: {enabled: false}}
{{- end -}}

{{/* Puts what the values lack into them. Every template begins with it: which is the first, Helm decides.
What is in a part that is there, and is in none of the keys, may have been taken out on purpose. */}}
{{- define "highwater.settle" -}}
{{- $newer := include "highwater.newer" . | fromYaml -}}
{{- range $part, $defaults := $newer.parts -}}
{{- if not (hasKey $.Values $part) -}}
{{- $_ := set $.Values $part $defaults -}}
{{- end -}}
{{- end -}}
{{- range $part, $defaults := $newer.keys -}}
{{- $values := get $.Values $part -}}
{{- range $key, $default := $defaults -}}
{{- if not (hasKey $values $key) -}}
{{- $_ := set $values $key $default -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
