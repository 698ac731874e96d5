#!/usr/bin/env bash
# Makes the bundle that run.sh needs on a machine with a GPU and without compilers or network:
#   bundle/base.tar.xz     Kubernetes and containerd; changes with their versions alone
#   bundle/product.tar.xz  agent, keeper, guard, operator, device plugin, their C library, rendered charts
# and what guard.sh needs there:
#   bundle/guard/          guard-bench, libhighwater-guard.so, libgpusim_cuda.so, keeper
# Needs Rust, Go 1.26, helm (or the cache of the test cluster), xz, and Debian's containerd, runc
# and containernetworking-plugins. Built parts are cached by content.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/highwater
bundle=$here/bundle
profile=release
build=true
guard_only=false
limit_mib=62

usage() {
    cat <<'END'
usage: pack.sh [--profile NAME] [--no-build] [--guard-only] [--limit-mib N]
  --profile NAME   Cargo profile of the product (default release)
  --no-build       take the product as it lies in the target folder
  --guard-only     make bundle/guard alone
  --limit-mib N    fail when bundle and tracked files together are larger (default 62)
END
}

while (($#)); do
    case $1 in
    --profile) profile=${2:?--profile needs a name} && shift ;;
    --no-build) build=false ;;
    --guard-only) guard_only=true ;;
    --limit-mib) limit_mib=${2:?--limit-mib needs a number} && shift ;;
    -h | --help) usage && exit ;;
    *) usage >&2 && exit 2 ;;
    esac
    shift
done

say() { printf '== %s\n' "$*"; }
fail() { printf 'pack.sh: %s\n' "$*" >&2 && exit 1; }

# A program from PATH or from where it is usually unpacked.
find_program() {
    local candidate
    for candidate in "$@"; do
        if command -v "$candidate"; then return; fi
    done
    fail "$1 is missing: see the prerequisites in README.md"
}

# --- Kubernetes and containerd ----------------------------------------------------------------

kubernetes_flags=(-trimpath -tags grpcnotrace -ldflags "-s -w
    -X k8s.io/component-base/version.gitVersion=v1.37.2
    -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=37")
# A dictionary as large as the whole finds what the programs have in common.
xz_flags=(--x86 "--lzma2=preset=9e,dict=400MiB")

debian_programs=(/usr/bin/containerd /usr/bin/containerd-shim-runc-v2 /usr/bin/ctr /usr/sbin/runc
    /usr/lib/cni/loopback)
seccomp=/usr/lib/x86_64-linux-gnu/libseccomp.so.2

base_key() {
    {
        printf '%s\n' "${kubernetes_flags[@]}" "${xz_flags[@]}"
        cat "$repository"/e2e/components/kubernetes/go.{mod,sum} "$here/components/kubernetes.go"
        cat "${debian_programs[@]}" "$seccomp"
    } | sha256sum | cut -c1-16
}

make_base() {
    local file
    for file in "${debian_programs[@]}" "$seccomp"; do
        [[ -e $file ]] || fail "$file is missing: apt-get install containerd runc containernetworking-plugins"
    done
    base=$cache/real-gpu-base-$(base_key).tar.xz
    if [[ -e $base ]]; then
        say "base: from the cache, $base"
        return
    fi
    local go stage
    go=$(find_program go /usr/local/go/bin/go /usr/lib/go/bin/go)
    stage=$(mktemp -d)
    mkdir -p "$stage/base/bin" "$stage/base/lib" "$cache"
    say "base: building Kubernetes (minutes where nothing of it is compiled yet)"
    local module=$repository/e2e/components/kubernetes
    printf '{"Replace": {"%s": "%s"}}' "$module/main.go" "$here/components/kubernetes.go" >"$stage/overlay.json"
    (cd "$module" && CGO_ENABLED=0 "$go" build -overlay "$stage/overlay.json" "${kubernetes_flags[@]}" \
        -o "$stage/base/bin/kubernetes" .)
    cp --dereference "${debian_programs[@]}" "$stage/base/bin/"
    cp --dereference "$seccomp" "$stage/base/lib/"
    say "base: compressing $(du -sm "$stage/base" | cut -f1) MiB (minutes)"
    tar --create --directory "$stage/base" --sort=name --owner=0 --group=0 --mtime=@0 . |
        xz --threads=1 "${xz_flags[@]}" --stdout >"$base.partial.$$"
    mv "$base.partial.$$" "$base"
    rm -rf "$stage"
}

# --- the product ------------------------------------------------------------------------------

packages=(highwater-agent highwater-operator gpu-device-plugin)
programs=(agent keeper operator gpu-device-plugin)
# The C library that the programs were linked against; the images carry it.
c_library=(ld-linux-x86-64.so.2 libc.so.6 libdl.so.2 libgcc_s.so.1 libm.so.6 libpthread.so.0 librt.so.1)

find_helm() {
    local cached
    for cached in "$cache"/helm-*/helm; do
        if [[ -x $cached ]]; then
            echo "$cached"
            return
        fi
    done
    find_program helm
}

target=${CARGO_TARGET_DIR:-$repository/target}
folder=$([[ $profile == dev ]] && echo debug || echo "$profile")

# A program of the product, stripped.
place() {
    [[ -e $target/$folder/$1 ]] || fail "$target/$folder/$1 is not built"
    strip --strip-all -o "$2/$1" "$target/$folder/$1"
    say "$1: $(($(stat -c %s "$2/$1") >> 10)) KiB stripped"
}

# The guard as it is shipped, and what measures it.
make_guard() {
    local made=$target/bench-guard
    mkdir -p "$bundle/guard"
    if $build; then
        say "guard: building"
        made=$("$repository/guard/bench/build.sh" "$profile")
        (cd "$repository" && cargo build --quiet --profile "$profile" --package=highwater-agent --bin keeper)
    fi
    [[ -e $made/libhighwater-guard.so ]] || fail "$made is not built: run guard/bench/build.sh"
    local name
    for name in guard-bench libgpusim_cuda.so; do strip --strip-unneeded -o "$bundle/guard/$name" "$made/$name"; done
    # As it is shipped.
    cp --force "$made/libhighwater-guard.so" "$bundle/guard/"
    place keeper "$bundle/guard"
    say "guard: $(($(stat -c %s "$bundle/guard/libhighwater-guard.so") >> 10)) KiB"
}

make_product() {
    local stage name helm
    if $build; then
        say "product: building (profile $profile)"
        (cd "$repository" && cargo build --quiet --profile "$profile" "${packages[@]/#/--package=}")
    fi
    stage=$(mktemp -d)
    mkdir -p "$stage"/{bin,lib,libc,manifests} "$bundle"
    for name in "${programs[@]}"; do place "$name" "$stage/bin"; done
    cp "$bundle/guard/libhighwater-guard.so" "$stage/lib/"
    for name in "${c_library[@]}"; do cp --dereference "/lib/x86_64-linux-gnu/$name" "$stage/libc/"; done
    helm=$(find_helm)
    # What that API server serves beyond what helm takes for granted.
    local served=admissionregistration.k8s.io/v1/MutatingAdmissionPolicy
    render() {
        "$helm" template "$1" "$repository/charts/$1" --kube-version 1.37.2 --api-versions "$served" --no-hooks \
            --namespace highwater-system "${@:2}"
    }
    render highwater-crds >"$stage/manifests/highwater-crds.yaml"
    render highwater --values "$here/values.yaml" >"$stage/manifests/highwater.yaml"
    render highwater --values "$here/values.yaml" --values "$here/values-sim.yaml" >"$stage/manifests/highwater-sim.yaml"
    tar --create --directory "$stage" --sort=name --owner=0 --group=0 --mtime=@0 . |
        xz --threads=1 --x86 --lzma2=preset=9,dict=64MiB --stdout >"$bundle/.product.partial"
    mv "$bundle/.product.partial" "$bundle/product.tar.xz"
    rm -rf "$stage"
}

measure() {
    local packed tracked
    # What run.sh needs; bundle/guard goes without the rest.
    packed=$(cat "$bundle"/*.tar.xz | wc -c)
    tracked=$(cd "$repository" && git ls-files --cached --others --exclude-standard -z |
        { xargs -0 stat --format=%s 2>/dev/null || true; } | awk '{sum += $1} END {print sum + 0}')
    say "base $(($(stat -c %s "$bundle/base.tar.xz") >> 10)) KiB, product $(($(stat -c %s "$bundle/product.tar.xz") >> 10)) KiB"
    say "bundle $((packed >> 20)) MiB + files of the repository $((tracked >> 20)) MiB = $(((packed + tracked) >> 20)) MiB"
    (((packed + tracked) >> 20 < limit_mib)) || fail "more than $limit_mib MiB"
}

make_guard
if $guard_only; then
    say "bundle/guard: $(du -sm "$bundle/guard" | cut -f1) MiB"
    exit
fi
make_base
make_product
cmp --silent "$base" "$bundle/base.tar.xz" || cp --force "$base" "$bundle/base.tar.xz"
measure
