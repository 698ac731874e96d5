#!/usr/bin/env bash
# Measures guard and keeper on a machine with a GPU, without a cluster: what the guard costs programs and
# PyTorch, whether every way of taking memory is held to a quota, how fast the keeper is. Needs the
# folder of `pack.sh --guard-only`, an NVIDIA driver, and Python 3 with PyTorch; no compilers.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
programs=$here/bundle/guard
out=${OUT:-$PWD/real-gpu-out}
only=bench,null,cases,pool,torch
named=()
limit=540

usage() {
    cat <<'END_OF_USAGE'
usage: guard.sh [--programs DIR] [--out DIR] [--only PART,...] [--cases NAME,...] [--limit SECONDS]
  --programs DIR   what pack.sh made (default: bundle/guard beside this script)
  --out DIR        where the report goes (default $OUT, else ./real-gpu-out)
  --only PARTS     of these, with commas (default all):
                     bench  what the guard adds to calls, launches and starts, with this driver
                     null   the same with a driver that does nothing
                     cases  every way of taking memory, with the guard and without
                     pool   the keeper
                     torch  a training step and a decode loop, with and without in pairs
  --cases NAMES    the part cases alone, and of it only these, with commas: of torch_cases.py --list, of
                   driver_cases.py --list, and rest (what is charged for a process at rest)
  --limit SECONDS  no part begins later than this (default 540)
END_OF_USAGE
}

while (($#)); do
    case $1 in
    --programs) programs=$(realpath "${2:?--programs needs a folder}") && shift ;;
    --out) out=${2:?--out needs a folder} && shift ;;
    --only) only=${2:?--only needs parts} && shift ;;
    --cases) only=cases && named=(--only "${2:?--cases needs names}") && shift ;;
    --limit) limit=${2:?--limit needs seconds} && shift ;;
    -h | --help) usage && exit ;;
    *) usage >&2 && exit 2 ;;
    esac
    shift
done

mkdir -p "$out"
# What was carried here may have lost its modes.
chmod +x "$programs/guard-bench" "$programs/keeper"
driver=$(python3 "$here/nvml.py" path)
export LD_LIBRARY_PATH=${driver%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
bench=$programs/guard-bench
library=$programs/libhighwater-guard.so
code=0

# part, most seconds, command
part() {
    local name=$1 seconds=$2 begun=$SECONDS status=0
    shift 2
    [[ ,$only, == *,$name,* ]] || return 0
    local left=$((limit - SECONDS))
    if ((left <= 5)); then
        printf '\n== %s: not begun, %s s are over\n' "$name" "$limit"
        code=1
        return 0
    fi
    printf '\n== %s\n' "$name"
    timeout --kill-after=10 "$((seconds < left ? seconds : left))" "$@" 2>"$out/guard-$name.err" || status=$?
    if ((status != 0)); then
        code=1
        printf 'exit code %s; its last words:\n' "$status"
        tail -n 5 "$out/guard-$name.err"
    fi
    printf '(%s s)\n' $((SECONDS - begun))
}

everything() {
    python3 "$here/nvml.py"
    printf 'kernel %s, %s cores, %s\n' "$(uname -r)" "$(nproc)" "$(date -u +%F)"
    part bench 240 "$bench" --real --library "$library"
    part null 120 "$bench" --library "$library" --null-driver "$programs/libgpusim_cuda.so"
    part cases 240 python3 "$here/guard_cases.py" --guard-bench "$bench" --library "$library" "${named[@]}"
    part pool 120 python3 "$here/pool_bench.py" --keeper "$programs/keeper"
    part torch 240 python3 "$here/torch_bench.py" --guard-bench "$bench" --library "$library"
    return "$code"
}

everything > >(tee "$out/guard.txt") || code=$?
wait
exit "$code"
