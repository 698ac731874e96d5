#!/bin/sh
# Says what a built guard needs of the system, and fails where that is more than promised: nothing but
# the C library, and no symbol newer than glibc 2.28.
#
#     guard/check-symbols.sh target/guard/libhighwater_guard.so
set -eu

library=${1:?usage: check-symbols.sh LIBRARY}
newest=2.28

needed=$(objdump -p "$library" | awk '$1 == "NEEDED" { print $2 }')
echo "needs: $(echo $needed)"
if [ "$needed" != libc.so.6 ]; then
    echo "$library must need libc.so.6 and nothing else" >&2
    exit 1
fi

symbols=$(objdump -T "$library" | sed -n 's/.*\*UND\*.*[( ]GLIBC_\([0-9.]*\)) *\(.*\)/\1 \2/p' | sort -V)
echo "highest: $(echo "$symbols" | tail -n 1)"
above=$(echo "$symbols" | awk -v newest="$newest" '
    { split($1, have, "."); split(newest, most, ".") }
    have[1] > most[1] || (have[1] == most[1] && have[2] + 0 > most[2] + 0)')
if [ -n "$above" ]; then
    echo "newer than glibc $newest:" >&2
    echo "$above" >&2
    exit 1
fi

for name in dlsym dlvsym cuInit cuMemAlloc_v2 cuGetProcAddress_v2 nvmlDeviceGetMemoryInfo_v2; do
    if ! objdump -T "$library" | grep -q " \.text.* $name\$"; then
        echo "$library does not export $name" >&2
        exit 1
    fi
done
