#!/bin/sh
# Loads a built guard with the loader and the C library of a folder, every symbol looked up at once, into a
# program that needs nothing itself. Fails where the guard cannot be loaded there.
#
# The folder is what a package of the C library unpacks to:
#
#     apt-get download libc6=VERSION && dpkg -x libc6_*.deb ROOT
#     guard/load-in-root.sh target/guard/libhighwater_guard.so ROOT
set -eu

usage="usage: load-in-root.sh LIBRARY ROOT"
library=$(realpath "${1:?$usage}")
root=$(realpath "${2:?$usage}")

libc=$(find "$root" -name libc.so.6 | head -n 1)
folder=$(dirname "${libc:?there is no libc.so.6 below $root}")
loader=$(find "$folder" -name 'ld-linux-*.so.*' | head -n 1)
: "${loader:?there is no loader beside $libc}"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cc -nostdlib -fPIE -pie -O1 -fno-stack-protector -x c -o "$work/program" - <<'EOF'
void _start(void) {
#if defined(__x86_64__)
    __asm__ volatile("mov $60, %eax\n xor %edi, %edi\n syscall");
#elif defined(__aarch64__)
    __asm__ volatile("mov x8, #93\n mov x0, #0\n svc #0");
#endif
    __builtin_unreachable();
}
EOF

# A library that cannot be preloaded is passed over with no more than a word.
if ! LD_PRELOAD=$library LD_BIND_NOW=1 LD_DEBUG=libs LD_DEBUG_OUTPUT=$work/loads \
    "$loader" --library-path "$folder" "$work/program" 2>"$work/said" || [ -s "$work/said" ]; then
    cat "$work/said" >&2
    echo "$library cannot be loaded with $libc" >&2
    exit 1
fi
for loaded in "$library" "$libc"; do
    if ! grep -qF "calling init: $loaded" "$work"/loads.*; then
        echo "$loaded was not loaded" >&2
        exit 1
    fi
done
echo "loads with $(grep -a -m 1 -o 'GNU C Library [ -~]*version [0-9.]*[0-9]' "$libc" || echo "$libc")"
