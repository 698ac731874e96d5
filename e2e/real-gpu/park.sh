#!/usr/bin/env bash
# Measures, on a machine with a GPU and without a cluster, what it takes to move a process's memory to the
# host and back, what a neighbour loses meanwhile, and what the driver does when it is interrupted. Needs
# this folder alone, an NVIDIA driver of 570 or newer, root, and Python 3 with PyTorch.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:-$PWD/real-gpu-out}
size=20
only=speed,facts
limit=150

usage() {
    cat <<'END_OF_USAGE'
usage: park.sh [--gib N] [--out DIR] [--only PART,...] [--limit SECONDS]
  --gib N          size of the image in GiB (default 20)
  --out DIR        where the report goes (default $OUT, else ./real-gpu-out)
  --only PARTS     of these, with commas (default all):
                     speed  park and restore against a plain copy, beside a neighbour that works
                     facts  deaths in the middle, restoring without room, what rights are needed
  --limit SECONDS  no step begins later than this (default 150)
END_OF_USAGE
}

while (($#)); do
    case $1 in
    --gib) size=${2:?--gib needs a number} && shift ;;
    --out) out=${2:?--out needs a folder} && shift ;;
    --only) only=${2:?--only needs parts} && shift ;;
    --limit) limit=${2:?--limit needs seconds} && shift ;;
    -h | --help) usage && exit ;;
    *) usage >&2 && exit 2 ;;
    esac
    shift
done

mkdir -p "$out"
driver=$(python3 "$here/nvml.py" path)
export LD_LIBRARY_PATH=${driver%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
code=0

everything() {
    python3 "$here/nvml.py"
    printf 'kernel %s, %s cores, %s\n' "$(uname -r)" "$(nproc)" "$(date -u +%F)"
    timeout --kill-after=5 "$limit" python3 "$here/park_bench.py" --gib "$size" --only "$only" \
        --limit "$((limit - SECONDS - 3))" 2>"$out/park.err" || {
        code=$?
        printf 'exit code %s; its last words:\n' "$code"
        tail -n 8 "$out/park.err"
    }
    return "$code"
}

everything > >(tee "$out/park.txt") || code=$?
wait
exit "$code"
