#!/usr/bin/env bash
# Builds what `make bench-guard` measures and prints the folder in which it all lies:
#   guard-bench, libhighwater-guard.so as it is shipped, libgpusim_cuda.so
# The argument is the cargo profile of the programs (release); where that is `dev`, the guard is as well.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
target=${CARGO_TARGET_DIR:-$repository/target}
profile=${1:-release}
cd "$repository"

folder_of() { [[ $1 == dev ]] && echo debug || echo "$1"; }

# The guard is built alone: any other crate would bring the standard library into it.
guard_profile=$profile
guard_flags=()
if [[ $profile != dev ]] && grep -q '^\[profile\.guard\]' Cargo.toml; then
    guard_profile=guard
    guard_flags=(--features freestanding)
fi
cargo build --quiet --profile "$guard_profile" --package highwater-guard "${guard_flags[@]}" >&2
cargo build --quiet --profile "$profile" --package highwater-guard-bench --package gpusim-cuda >&2

out=$target/bench-guard
mkdir -p "$out"
place() { install -m 0755 "$1" "$out/.new" && mv -f "$out/.new" "$out/$2"; }
place "$target/$(folder_of "$guard_profile")/libhighwater_guard.so" libhighwater-guard.so
place "$target/$(folder_of "$profile")/guard-bench" guard-bench
place "$target/$(folder_of "$profile")/libgpusim_cuda.so" libgpusim_cuda.so
echo "$out"
