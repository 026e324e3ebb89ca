#!/usr/bin/env bash
# Where a create, an exec and a kill spend their time: perf over the whole machine while cycles run, 16 in flight.
# Usage: benchmarks/profile.sh [STATE_DIR]     (a directory on the file system to look at; default: a temporary one)
# Needs perf (Debian: linux-perf) and `make setup`. Prints cycles a second, then shares by program and by kernel function.
set -euo pipefail
cd "$(dirname "$0")/.."
base=${1:-$(mktemp -d)}
state=$base/sandmill-profile-$$
mkdir -p "$state"
data=$state.perf
.venv/bin/sandmill serve --listen 127.0.0.1:0 --data-listen 127.0.0.1:0 --state-dir "$state" > "$state.out" &
server=$!
trap 'kill -TERM $server 2>/dev/null; wait $server 2>/dev/null || true; rm -rf "$state" "$state.out" "$data"' EXIT
for _ in $(seq 100); do grep -q '^ready' "$state.out" && break; sleep 0.1; done
SANDMILL_API_URL=$(sed -n 's/^ready api=\([^ ]*\).*/\1/p' "$state.out")
SANDMILL_API_KEY=$(cat "$state/api-key")
export SANDMILL_API_URL SANDMILL_API_KEY
perf record -q -F 2000 -a -g -o "$data" -- .venv/bin/python - <<'PY'
import time
from concurrent.futures import ThreadPoolExecutor
from sandmill import Sandbox

def cycle(_: int) -> None:
    with Sandbox() as box:
        box.run(["/bin/true"])

with ThreadPoolExecutor(16) as pool:
    list(pool.map(cycle, range(16)))
    start = time.perf_counter()
    list(pool.map(cycle, range(300)))
    print(f"{300 / (time.perf_counter() - start):.0f} cycles a second")
PY
report() { perf report -i "$data" --stdio -g none "$@" 2>/dev/null | grep -v '^#' | grep -v '^$'; }
echo "by program:" && report --no-children --sort comm | head -12
echo "by kernel function, with what it calls:" &&
    report --children --comm tokio-rt-worker --sort sym | grep -E '\[k\] (vfs_mkdir|vfs_rmdir|copy_namespaces|copy_net_ns|vfs_get_tree|do_exit|evict|__x64_sys_mount|seccomp)' | head -20
