#!/usr/bin/env bash
# Records, on a machine with a GPU and without a cluster, what programs that leak and programs that use much rightly
# look like from outside: 70 of them, in two batches side by side, each four hours in four minutes. Needs this folder
# alone, an NVIDIA driver, 120 GiB of device memory, and Python 3 with PyTorch.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:-$PWD/real-gpu-out}
batches=1,2
speed=68
limit=575
only=

usage() {
    cat <<'END_OF_USAGE'
usage: leaks.sh [--out DIR] [--batch N,...] [--speed N] [--only NAME,...] [--limit SECONDS]
  --out DIR        where series, labels and report go (default $OUT, else ./real-gpu-out)
  --batch N,...    of the two halves of the variants (default 1,2); each takes less than five minutes
  --speed N        how many times as fast as the clock a story goes (default 68)
  --only NAMES     of the variants that `leaks/variants.py` lists, with commas (default all)
  --limit SECONDS  stories are cut off so that all ends by then (default 575)
END_OF_USAGE
}

while (($#)); do
    case $1 in
    --out) out=${2:?--out needs a folder} && shift ;;
    --batch) batches=${2:?--batch needs numbers} && shift ;;
    --speed) speed=${2:?--speed needs a number} && shift ;;
    --only) only=${2:?--only needs names} && shift ;;
    --limit) limit=${2:?--limit needs seconds} && shift ;;
    -h | --help) usage && exit ;;
    *) usage >&2 && exit 2 ;;
    esac
    shift
done

mkdir -p "$out"
work=$(mktemp -d /var/tmp/highwater-leaks.XXXXXX)
trap 'rm -rf "$work"' EXIT
driver=$(python3 "$here/nvml.py" path)
export LD_LIBRARY_PATH=${driver%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
code=0

everything() {
    python3 "$here/nvml.py"
    printf 'kernel %s, %s cores, %s\n' "$(uname -r)" "$(nproc)" "$(date -u +%F)"
    # Read once, so that not all read the libraries from the disk at once.
    timeout 90 python3 -c 'import torch; print("PyTorch", torch.__version__, "CUDA", torch.version.cuda)'
    timeout --kill-after=10 "$((limit - SECONDS + 10))" python3 "$here/leaks/record.py" --out "$out" --work "$work" \
        --batch "$batches" --speed "$speed" ${only:+--only "$only"} --limit "$((limit - SECONDS))"
}

everything > >(tee "$out/leaks.txt") || code=$?
wait
((code == 0)) || tail -n 12 "$out/programs.log" 2>/dev/null || true
exit "$code"
