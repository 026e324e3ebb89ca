#!/bin/bash
set -euo pipefail
python3 - <<'END'
import sqlite3

db = sqlite3.connect("/app/shop.db")
kept, merged = {}, {}
for number, email in db.execute("SELECT id, email FROM customers ORDER BY id").fetchall():
    merged[number] = kept.setdefault(email.strip().lower(), number)
with db:
    db.execute("CREATE TABLE orphans (id INTEGER PRIMARY KEY, customer_id INTEGER NOT NULL, cents INTEGER NOT NULL)")
    db.execute("INSERT INTO orphans SELECT * FROM orders WHERE customer_id NOT IN (SELECT id FROM customers)")
    db.execute("DELETE FROM orders WHERE customer_id NOT IN (SELECT id FROM customers)")
    db.executemany("UPDATE orders SET customer_id = ? WHERE customer_id = ?", [(to, one) for one, to in merged.items() if to != one])
    db.executemany("DELETE FROM customers WHERE id = ?", [(one,) for one, to in merged.items() if to != one])
    db.execute("UPDATE customers SET email = lower(trim(email))")
    db.execute("CREATE UNIQUE INDEX customers_email ON customers(email)")
END
