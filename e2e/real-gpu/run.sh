#!/usr/bin/env bash
# Brings up a real Kubernetes on this machine from the bundle of pack.sh, installs Highwater in it,
# runs check.py and takes everything down again. Needs root, an NVIDIA driver, and Python 3 with
# PyTorch; no network, no compilers, no ip or iptables. Every step is bounded in time.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bundle=$here/bundle
out=${OUT:-$PWD/real-gpu-out}
work=${HIGHWATER_REAL_GPU_DIR:-/var/tmp/highwater-real-gpu}
simulated=
backend=torch
limit=480
grow_seconds=
only=
stay=false
shared=24 # pods among which the device plugin shares each GPU
inside=false
checking=false
arguments=("$@")

usage() {
    cat <<'END'
usage: run.sh [--bundle DIR] [--out DIR] [--limit SECONDS] [--only SECTION,...] [--grow-seconds N] [--stay] [--sim DIR]
  --bundle DIR      what pack.sh made (default: bundle/ beside this script)
  --out DIR         where report and logs go (default $OUT, else ./real-gpu-out)
  --limit SECONDS   the whole run is stopped after so long (default 480)
  --only SECTIONS   of rest, cost, growth, quota, breaker, pool, guard (default: these), park, reclaim, reaction, leaks
  --grow-seconds N  how long two pods grow while ledger and driver are compared (default 120; 40 with --only)
  --stay            leave the cluster up after the checks, until the limit or Ctrl-C
  --sim DIR         no GPU: the simulated driver whose program and libraries lie in DIR
END
}

while (($#)); do
    case $1 in
    --bundle) bundle=$(realpath "${2:?--bundle needs a folder}") && shift ;;
    --out) out=${2:?--out needs a folder} && shift ;;
    --limit) limit=${2:?--limit needs seconds} && shift ;;
    --only) only=${2:?--only needs sections} && shift ;;
    --grow-seconds) grow_seconds=${2:?--grow-seconds needs a number} && shift ;;
    --stay) stay=true ;;
    --sim) simulated=$(realpath "${2:?--sim needs a folder}") && backend=driver && shift ;;
    --inside) inside=true ;; # our own second stage
    -h | --help) usage && exit ;;
    *) usage >&2 && exit 2 ;;
    esac
    shift
done

[[ -n $grow_seconds ]] || grow_seconds=$([[ -z $only ]] && echo 120 || echo 40)

started=$(date +%s)
say() { printf '[%3ds] %s\n' $(($(date +%s) - ${HIGHWATER_STARTED:-$started})) "$*"; }
fail() {
    say "FAILED: $*"
    exit 1
}

# --- first stage: namespaces and the time limit -----------------------------------------------

if ! $inside; then
    ((EUID == 0)) || fail "run this as root: it starts a kubelet"
    for program in python3 openssl tar mount timeout flock setsid unshare; do
        command -v "$program" >/dev/null || fail "$program is missing on this machine"
    done
    for part in base product; do
        [[ -e $bundle/$part.tar.xz ]] || fail "$bundle/$part.tar.xz is missing: make it with pack.sh"
    done
    mkdir -p "$out"
    export HIGHWATER_STARTED=$started
    # Mounts stay in a namespace of our own. The simulation gets a network of its own as well: it
    # may run beside other clusters.
    own=(unshare --mount --propagation slave)
    [[ -z $simulated ]] || own+=(--net)
    if ! "${own[@]}" true 2>/dev/null; then
        say "no mount namespace to be had: mounting on the machine itself"
        own=()
    fi
    exec timeout --kill-after=60 "$limit" "${own[@]}" bash "${BASH_SOURCE[0]}" --inside "${arguments[@]}"
fi

# --- tools ------------------------------------------------------------------------------------

bin=$work/bundle/bin
pki=$work/pki
logs=$work/logs
export PATH=$bin:$PATH KUBECONFIG_FOLDER=$pki PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1

kube() { timeout 30 python3 "$here/kube.py" "$@"; }

# A component in a session of its own; its log is named after it.
start() {
    local name=$1
    shift
    # Without the lock: what outlives a killed run must not hold it.
    setsid "$@" </dev/null >"$logs/$name.log" 2>&1 9>&- &
    echo "$!" >"$work/pids/$name"
    disown
}

alive() { kill -0 "$(cat "$work/pids/$1")" 2>/dev/null; }

# Waits for a command to succeed: what, seconds, component that must live, command.
await() {
    local what=$1 seconds=$2 component=$3 begun=$SECONDS
    shift 3
    until "$@" >"$work/await.log" 2>&1; do
        if [[ $component != - ]] && ! alive "$component"; then
            tail -n 20 "$logs/$component.log"
            fail "$component ended before: $what"
        fi
        if ((SECONDS - begun >= seconds)); then
            tail -n 5 "$work/await.log"
            [[ $component == - ]] || tail -n 20 "$logs/$component.log"
            fail "after $seconds s still not: $what"
        fi
        sleep 0.2
    done
    say "$what ($((SECONDS - begun)) s)"
}

# --- end --------------------------------------------------------------------------------------

# Processes whose program lies in our own folder.
own_processes() {
    local link
    for link in /proc/[0-9]*/exe; do
        if [[ $(readlink "$link") == "$work/"* ]]; then
            link=${link#/proc/}
            echo "${link%/exe}"
        fi
    done
}

# Groups of processes below which the kubelet puts the pods.
pod_cgroups() {
    if [[ $(cgroup_version) == v2 ]]; then
        echo /sys/fs/cgroup/kubepods
    else
        printf '%s\n' /sys/fs/cgroup/*/highwater-real-gpu
    fi
}

pod_processes() {
    local folder
    for folder in $(pod_cgroups); do
        [[ ! -d $folder ]] || find "$folder" -name cgroup.procs -exec cat {} + 2>/dev/null
    done | sort -u
}

# Ends everything of this run, or of an earlier one that was killed.
stop_everything() {
    local pid path
    [[ -d $work/pids ]] || return 0
    for pid in $(own_processes); do kill -KILL "$pid" 2>/dev/null; done
    if [[ -e $work/pids/kubelet ]]; then
        for pid in $(pod_processes); do kill -KILL "$pid" 2>/dev/null; done
    fi
    sleep 0.5
    while read -r path; do umount --lazy "$path" 2>/dev/null; done < <(
        awk '{print $5}' /proc/self/mountinfo | sort -r |
            grep -E "^($work|/var/lib/kubelet|/run/containerd|/run/highwater|/run/highwater-driver|/run/highwater-keeper|/run/gpusim|/opt/gpusim)(/|$)"
    )
    if [[ -e $work/pids/kubelet ]]; then
        for path in $(pod_cgroups); do
            [[ ! -d $path ]] || find "$path" -depth -type d -exec rmdir {} \; 2>/dev/null
        done
    fi
    rm -rf "$work" 2>/dev/null
    return 0
}

# shellcheck disable=SC2317 # called by a trap
finish() {
    local code=$?
    trap '' TERM INT HUP EXIT
    set +e
    if ((code == 143)); then say "stopped from outside, or the limit of $limit s was reached"; fi
    if ((code != 0)) && ! $checking && [[ -e $pki/admin.crt ]]; then
        say "what the cluster says:"
        timeout 20 python3 "$here/describe.py" 2>&1 | cut -c1-600 | tail -n 60
        find "$logs/pods" -path '*highwater-system*' -name '*.log' -exec tail -n 12 {} + 2>/dev/null | cut -c1-400
    fi
    cp "$work/needs.json" "$work/kubelet.yaml" "$work/containerd.toml" "$logs/" 2>/dev/null
    timeout 20 tar --create --gzip --file "$out/logs.tar.gz" --directory "$work" --ignore-failed-read \
        logs 2>/dev/null
    say "taking the cluster down"
    stop_everything
    say "done, exit code $code; report and logs: $out"
    exit "$code"
}

# --- the bundle and the machine ---------------------------------------------------------------

prepare() {
    exec 9>"$work.lock"
    flock --nonblock 9 || fail "another run is using $work"
    trap finish EXIT
    trap 'exit 143' TERM INT HUP
    (set +e && stop_everything)
    [[ -z $(pod_processes) ]] || fail "a kubelet is at work on this machine: pods in $(pod_cgroups | head -1)"
    mkdir -p "$work"/{bundle,pids,pki,logs/pods,images,containerd,cni,kubelet,driver,run-containerd,control,pod}
    mount --make-rshared /
    local path
    for path in /var/lib/kubelet /run/containerd /run/highwater /run/highwater-keeper /run/highwater-driver; do
        mkdir -p "$path" # stays: another cluster may have come to mount there
    done
    mount --bind "$work/kubelet" /var/lib/kubelet
    mount --bind "$work/run-containerd" /run/containerd
    # As on a node, where /run is in memory: the agent's journal is synced before anything is granted.
    mount -t tmpfs -o mode=755 highwater /run/highwater
    mount -t tmpfs -o mode=755 highwater /run/highwater-keeper
    mount --bind "$work/driver" /run/highwater-driver
    say "unpacking $(du -cm "$bundle"/*.tar.xz | tail -1 | cut -f1) MiB"
    local part
    for part in base product; do
        if command -v xz >/dev/null; then
            timeout 120 tar --extract --xz --file "$bundle/$part.tar.xz" --directory "$work/bundle"
        else
            timeout 180 python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' \
                "$bundle/$part.tar.xz" "$work/bundle"
        fi
    done
    for part in etcd kube-apiserver kube-controller-manager kube-scheduler kubelet; do
        ln -s kubernetes "$bin/$part"
    done
    node_ip=$(python3 "$here/address.py") || fail "no address for the node"
    node=n1
    say "bundle unpacked; node address $node_ip; kernel $(uname -r); cgroup $(cgroup_version)"
}

cgroup_version() { [[ -e /sys/fs/cgroup/cgroup.controllers ]] && echo v2 || echo v1; }

# The cgroup below which the kubelet works. Version 1 machines are for the simulation, beside
# other clusters: a folder of its own there, with what the kernel wants set first.
cgroup_root() {
    if [[ $(cgroup_version) == v2 ]]; then
        echo /
        return
    fi
    local hierarchy file
    for hierarchy in /sys/fs/cgroup/*/; do
        mkdir -p "$hierarchy/highwater-real-gpu"
        for file in cpuset.cpus cpuset.mems; do
            [[ ! -e $hierarchy/$file ]] || cat "$hierarchy/$file" >"$hierarchy/highwater-real-gpu/$file"
        done
    done
    echo /highwater-real-gpu
}

prepare_driver() {
    if [[ -n $simulated ]]; then
        mkdir -p "$work/sim/lib" "$work/sim/run"
        cp "$simulated/gpusim" "$work/sim/"
        cp "$simulated/libgpusim_cuda.so" "$work/sim/lib/libcuda.so.1"
        cp "$simulated/libgpusim_nvml.so" "$work/sim/lib/libnvidia-ml.so.1"
        local path
        for path in /run/gpusim /opt/gpusim; do
            mkdir -p "$path"
        done
        mount --bind "$work/sim/run" /run/gpusim
        mount --bind "$work/sim" /opt/gpusim
        export LD_LIBRARY_PATH=$work/sim/lib
        start gpusim "$work/sim/gpusim" daemon
        await "simulated driver answers" 10 gpusim python3 "$here/nvml.py"
    fi
    local library
    library=$(python3 "$here/nvml.py" path) || fail "no NVIDIA driver"
    cp --dereference "$library" /run/highwater-driver/libnvidia-ml.so.1
    # For the keeper, which makes memory through CUDA.
    library=${library%/*}/libcuda.so.1
    [[ -e $library ]] || fail "the driver's libcuda.so.1 is not beside its libnvidia-ml.so.1"
    cp --dereference "$library" /run/highwater-driver/libcuda.so.1
    timeout 60 python3 "$here/nvml.py" || fail "the driver does not answer through $library"
}

# What Python with PyTorch needs of this machine is found by running it once.
probe_python() {
    cp "$here"/{workload,runner,driver_cases,torch_cases,actions_cases,leaks_case,thief}.py "$work/pod/"
    cp -R "$here/leaks" "$work/pod/"
    if ! timeout 150 python3 "$work/pod/workload.py" needs --backend "$backend" >"$work/needs.json" 2>"$logs/needs.log"; then
        tail -n 5 "$logs/needs.log"
        return 1
    fi
}

# --- the cluster ------------------------------------------------------------------------------

certificate() {
    local name=$1 subject=$2
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout "$pki/$name.key" \
        -out "$pki/$name.csr" -subj "$subject" 2>/dev/null
    openssl x509 -req -in "$pki/$name.csr" -CA "$pki/ca.crt" -CAkey "$pki/ca.key" -CAcreateserial -days 30 \
        -out "$pki/$name.crt" -extfile <(
            printf 'subjectAltName=IP:127.0.0.1,IP:10.96.0.1,IP:%s,DNS:localhost,DNS:%s\n' "$node_ip" "$node"
            printf 'extendedKeyUsage=serverAuth,clientAuth\n'
        ) 2>/dev/null
    cat >"$pki/$name.kubeconfig" <<END
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:6443", certificate-authority: $pki/ca.crt}}]
users: [{name: u, user: {client-certificate: $pki/$name.crt, client-key: $pki/$name.key}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
END
}

start_control_plane() {
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout "$pki/ca.key" \
        -out "$pki/ca.crt" -days 30 -subj /CN=highwater-real-gpu 2>/dev/null
    certificate kube-apiserver /CN=kube-apiserver
    certificate admin /O=system:masters/CN=admin
    certificate kubelet "/O=system:nodes/CN=system:node:$node"
    certificate kube-controller-manager /CN=system:kube-controller-manager
    certificate kube-scheduler /CN=system:kube-scheduler
    openssl ecparam -name prime256v1 -genkey -noout -out "$pki/accounts.key"
    start etcd etcd --data-dir="$work/etcd" --listen-client-urls=http://127.0.0.1:2379 \
        --advertise-client-urls=http://127.0.0.1:2379 --listen-peer-urls=http://127.0.0.1:2380 --unsafe-no-fsync
    start kube-apiserver kube-apiserver --etcd-servers=http://127.0.0.1:2379 --secure-port=6443 \
        --bind-address=0.0.0.0 --advertise-address="$node_ip" --tls-cert-file="$pki/kube-apiserver.crt" \
        --tls-private-key-file="$pki/kube-apiserver.key" --client-ca-file="$pki/ca.crt" \
        --service-account-key-file="$pki/accounts.key" --service-account-signing-key-file="$pki/accounts.key" \
        --service-account-issuer=https://kubernetes.default.svc --service-cluster-ip-range=10.96.0.0/16 \
        --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
        --kubelet-client-certificate="$pki/admin.crt" --kubelet-client-key="$pki/admin.key" \
        --kubelet-preferred-address-types=InternalIP --allow-privileged=true
    await "API server is ready" 60 kube-apiserver kube get /readyz
    local name flag flags
    for name in kube-controller-manager kube-scheduler; do
        flags=(--bind-address=127.0.0.1 --leader-elect=false)
        for flag in kubeconfig authentication-kubeconfig authorization-kubeconfig; do
            flags+=("--$flag=$pki/$name.kubeconfig")
        done
        if [[ $name == kube-controller-manager ]]; then
            flags+=(--use-service-account-credentials=true --root-ca-file="$pki/ca.crt"
                --service-account-private-key-file="$pki/accounts.key")
        fi
        start "$name" "$name" "${flags[@]}"
    done
    await "default service account exists" 30 kube-controller-manager \
        kube get /api/v1/namespaces/default/serviceaccounts/default
}

# Overlay mounts do not work on top of every file system.
snapshotter() {
    mkdir -p "$work"/overlay/{lower,upper,work,merged}
    if mount -t overlay overlay -o "lowerdir=$work/overlay/lower,upperdir=$work/overlay/upper,workdir=$work/overlay/work" \
        "$work/overlay/merged" 2>/dev/null; then
        umount "$work/overlay/merged"
        echo overlayfs
    else
        echo native
    fi
}

start_containerd() {
    cp "$here/own_address.py" "$bin/own-address"
    chmod 755 "$bin/own-address"
    printf '{"cniVersion":"1.0.0","name":"host","plugins":[{"type":"own-address","numbers":"%s"}]}\n' \
        "$work/addresses" >"$work/cni/10-own-address.conflist"
    cat >"$work/containerd.toml" <<END
version = 2
root = "$work/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "highwater.local/pause:dev"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "$bin"
    conf_dir = "$work/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "$(snapshotter)"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
END
    # libseccomp for runc, where the machine has none.
    start containerd env LD_LIBRARY_PATH="$work/bundle/lib" containerd --config "$work/containerd.toml"
    await "containerd answers" 30 containerd timeout 5 ctr version
}

import_images() {
    python3 "$here/images.py" pause "$work/images/pause.tar"
    local name guard=usr/lib/highwater/libhighwater-guard.so
    python3 "$here/images.py" program "$work/images/agent.tar" agent "$work/bundle/libc" \
        "usr/bin/agent=$bin/agent" "usr/bin/keeper=$bin/keeper" "$guard=$work/bundle/lib/libhighwater-guard.so"
    python3 "$here/images.py" program "$work/images/operator.tar" operator "$work/bundle/libc" \
        "usr/bin/operator=$bin/operator"
    python3 "$here/images.py" python "$work/images/python.tar" "$work/needs.json"
    for name in pause agent operator python; do
        timeout 60 ctr --namespace k8s.io images import --snapshotter \
            "$(sed -n 's/.*snapshotter = "\(.*\)"/\1/p' "$work/containerd.toml")" "$work/images/$name.tar" \
            >"$logs/import-$name.log" 2>&1 || { cat "$logs/import-$name.log" && fail "importing image $name"; }
        say "image $name imported ($(du -m "$work/images/$name.tar" | cut -f1) MiB)"
    done
}

start_kubelet() {
    cat >"$work/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $pki/ca.crt}}
authorization: {mode: Webhook}
cgroupDriver: cgroupfs
cgroupRoot: $(cgroup_root)
cgroupsPerQOS: true
enforceNodeAllocatable: []
failSwapOn: false
failCgroupV1: false
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
podLogsDir: $logs/pods
resolvConf: ""
evictionHard: {memory.available: "100Mi", nodefs.available: "1%", imagefs.available: "1%", nodefs.inodesFree: "1%"}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
tlsCertFile: $pki/kubelet.crt
tlsPrivateKeyFile: $pki/kubelet.key
nodeStatusUpdateFrequency: 5s
crashLoopBackOff: {maxContainerRestartPeriod: 2s}
END
    start kubelet kubelet --config="$work/kubelet.yaml" --kubeconfig="$pki/kubelet.kubeconfig" \
        --hostname-override="$node" --node-ip="$node_ip" --node-labels=nvidia.com/gpu.present=true
    await "node is Ready" 60 kubelet python3 "$here/describe.py" ready-node "$node"
    local mode=real
    [[ -z $simulated ]] || mode=sim
    start device-plugin gpu-device-plugin --mode "$mode" --replicas "$shared"
    await "nvidia.com/gpu is allocatable" 30 device-plugin python3 "$here/describe.py" allocatable "$node" "$shared"
}

install() {
    local manifest=highwater.yaml
    [[ -z $simulated ]] || manifest=highwater-sim.yaml
    printf 'apiVersion: v1\nkind: Namespace\nmetadata:\n  name: highwater-system\n' >"$work/namespace.yaml"
    kube apply "$work/namespace.yaml" "$work/bundle/manifests/highwater-crds.yaml" \
        "$work/bundle/manifests/$manifest" >"$logs/apply.log" 2>&1 || { tail -n 5 "$logs/apply.log" && fail "applying the chart"; }
    say "chart applied ($(wc -l <"$logs/apply.log") objects of $manifest)"
    await "agent runs and its GpuMemoryNode is Monitored" 60 - python3 "$here/describe.py" monitored "$node"
    await "keeper holds and serves" 60 - python3 "$here/describe.py" rolled-out highwater-system highwater-keeper
    await "kubelet knows the guard's volumes" 30 - python3 "$here/describe.py" csi-driver "$node" guard.highwater.dev
    await "operator is ready" 60 - python3 "$here/describe.py" available highwater-system highwater-operator
}

main() {
    prepare
    prepare_driver
    probe_python &
    local probe=$!
    start_control_plane
    start_containerd
    wait "$probe" || fail "Python with PyTorch does not run on this machine's GPU: see logs/needs.log"
    say "Python needs: $(python3 -c 'import json, sys; n = json.load(open(sys.argv[1])); print(len(n["files"]), "files and", n["folders"])' "$work/needs.json")"
    import_images
    start_kubelet
    install
    say "checking ${only:-everything}"
    checking=true
    local code=0
    python3 "$here/check.py" --node "$node" --work "$work" --backend "$backend" \
        --grow-seconds "$grow_seconds" ${only:+--only "$only"} --report "$out/report.txt" 9>&- &
    wait "$!" || code=$?
    timeout 20 python3 "$here/describe.py" >"$out/cluster.txt" 2>&1 || true
    if $stay; then
        say "staying up: KUBECONFIG=$pki/admin.kubeconfig, with the network and mounts of PID $$ (nsenter -t $$ -m -n)"
        sleep infinity &
        wait "$!"
    fi
    exit "$code"
}

main
