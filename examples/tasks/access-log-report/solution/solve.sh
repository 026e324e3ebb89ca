#!/bin/bash
set -euo pipefail
python3 - <<'END'
import collections, json, re

VALID = re.compile(r'(\S+) \S+ \S+ \[(\d+)/(\w+)/(\d+):(\d\d)[^\]]*\] "\S+ \S+ \S+" (\d{3}) (\d+|-)(?: |$)')
clients, hours = collections.Counter(), collections.Counter()
report = dict(requests=0, damaged=0, errors=0, bytes=0)
for line in open("/app/access.log").read().splitlines():
    found = VALID.match(line)
    if not found:
        report["damaged"] += 1
        continue
    address, day, _, year, hour, status, size = found.groups()
    report["requests"] += 1
    clients[address] += 1
    report["bytes"] += 0 if size == "-" else int(size)
    if status.startswith("5"):
        report["errors"] += 1
        hours[f"{year}-05-{day}T{hour}"] += 1
report["top_clients"] = sorted(map(list, clients.items()), key=lambda one: (-one[1], one[0]))[:3]
report["slowest_hour"] = min(hours, key=lambda hour: (-hours[hour], hour))
json.dump(report, open("/app/report.json", "w"))
END
