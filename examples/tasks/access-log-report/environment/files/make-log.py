"""Writes /app/access.log; always the same."""

import random

rng = random.Random(20240501)
clients = [f"10.0.{a}.{b}" for a in (0, 1, 7) for b in (3, 14, 15, 92)]
weights = [40, 25, 25, 9, 8, 7, 6, 5, 4, 3, 2, 1]
paths = ["/", "/index.html", "/api/items", "/api/items?q=a b", "/static/app.js", "/login"]
lines = []
for n in range(4000):
    hour, minute, second = n * 24 // 4000, rng.randrange(60), rng.randrange(60)
    bad = 0.25 if hour in (9, 17) else 0.04
    status = rng.choice([500, 502, 503]) if rng.random() < bad else rng.choice([200, 200, 200, 301, 304, 404])
    size = "-" if status == 304 else str(rng.randrange(120, 90000))
    path = rng.choice(paths).replace(" ", "%20")
    line = (
        f'{rng.choices(clients, weights)[0]} - - [01/May/2024:{hour:02}:{minute:02}:{second:02} +0000] '
        f'"{rng.choice(["GET", "GET", "GET", "POST"])} {path} HTTP/1.1" {status} {size} "-" "agent \\"x\\" {n}"'
    )
    fate = rng.random()
    if fate < 0.01:
        line = line[: rng.randrange(5, 40)]
    elif fate < 0.015:
        line = line.replace("HTTP/1.1\" ", "HTTP/1.1\" x")
    elif fate < 0.02:
        line = ""
    lines.append(line)
open("/app/access.log", "w").write("\n".join(lines) + "\n")
