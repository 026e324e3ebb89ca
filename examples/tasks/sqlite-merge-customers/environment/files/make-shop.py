"""Writes /app/shop.db; always the same."""

import random
import sqlite3

rng = random.Random(7)
db = sqlite3.connect("/app/shop.db")
db.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY, email TEXT NOT NULL, name TEXT NOT NULL)")
db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER NOT NULL, cents INTEGER NOT NULL)")
number = 0
for person in range(120):
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        number += rng.choice([1, 1, 2])
        email = f"person{person}@Example.org"
        email = rng.choice([email, email.upper(), email.lower(), f" {email}", f"{email}  "])
        db.execute("INSERT INTO customers VALUES (?, ?, ?)", (number, email, f"Person {person}"))
for order in range(1, 900):
    db.execute("INSERT INTO orders VALUES (?, ?, ?)", (order, rng.randint(1, number + 3), rng.randint(100, 99999)))
db.commit()
