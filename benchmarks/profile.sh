#!/usr/bin/env bash
# Where a create, an exec and a kill spend their time: perf over the whole machine while cycles run, 16 in flight.
# Usage: benchmarks/profile.sh [STATE_DIR]     (a directory on the file system to look at; default: a temporary one)
# Needs perf (Debian: linux-perf), cc and `make setup`. Prints cycles a second; the share of each program, and what it does
# in it, by system call; and what a program's start alone costs here, with and without a C library.
set -euo pipefail
cd "$(dirname "$0")/.."
base=${1:-$(mktemp -d)}
state=$base/sandmill-profile-$$
mkdir -p "$state"
.venv/bin/sandmill serve --listen 127.0.0.1:0 --data-listen 127.0.0.1:0 --state-dir "$state" > "$state.out" 2> /dev/null &
server=$!
trap 'kill -TERM $server 2>/dev/null; wait $server 2>/dev/null || true; rm -rf "$state" "$state".*' EXIT
for _ in $(seq 100); do grep -q '^ready' "$state.out" && break; sleep 0.1; done
SANDMILL_API_URL=$(sed -n 's/^ready api=\([^ ]*\).*/\1/p' "$state.out")
SANDMILL_API_KEY=$(cat "$state/api-key")
export SANDMILL_API_URL SANDMILL_API_KEY
stolen() { awk '/^cpu /{print $9}' /proc/stat; }
before=$(stolen)
perf record -q -F 2000 -a -g -o "$state.perf" -- .venv/bin/python - <<'PY'
import time
from concurrent.futures import ThreadPoolExecutor
from sandmill import Sandbox

def cycle(_: int) -> None:
    with Sandbox() as box:
        box.run(["/bin/true"])

with ThreadPoolExecutor(16) as pool:
    list(pool.map(cycle, range(16)))
    start = time.perf_counter()
    list(pool.map(cycle, range(600)))
    taken = time.perf_counter() - start
    print(f"{600 / taken:.0f} cycles a second under perf; {taken * 2 / 600 * 1000:.1f} ms of two cores for each")
PY
echo "stolen by the machine's host meanwhile: $(($(stolen) - before)) hundredths of a second"
perf script -i "$state.perf" -F comm,ip,sym 2> /dev/null | .venv/bin/python benchmarks/profile.py

cat > "$state.none.c" <<'C'
void _start(void) { __asm__ volatile("mov $60, %eax; xor %edi, %edi; syscall"); }
C
echo 'int main(void) { return 0; }' > "$state.libc.c"
cc -O2 -static -nostdlib "$state.none.c" -o "$state.none"
cc -O2 -static "$state.libc.c" -o "$state.libc"
clock() { perf stat -r 300 -- "$1" 2>&1 | awk '/task-clock/{print $1}'; }
echo "a start of a static program, CPU ms: $(clock "$state.none") without a C library, $(clock "$state.libc") with one; of /bin/true: $(clock /bin/true)"
