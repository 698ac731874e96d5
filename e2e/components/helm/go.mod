module highwater.dev/e2e/components/helm

go 1.26.0

require helm.sh/helm/v3 v3.22.0

tool helm.sh/helm/v3/cmd/helm
