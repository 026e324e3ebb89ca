"""What the database held before, made anew here: nothing in the sandbox is believed."""

import random

rng = random.Random(7)
CUSTOMERS: list[tuple[int, str, str]] = []
number = 0
for person in range(120):
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        number += rng.choice([1, 1, 2])
        email = f"person{person}@Example.org"
        email = rng.choice([email, email.upper(), email.lower(), f" {email}", f"{email}  "])
        CUSTOMERS.append((number, email.strip().lower(), f"Person {person}"))
ORDERS = [(order, rng.randint(1, number + 3), rng.randint(100, 99999)) for order in range(1, 900)]

KEPT: dict[str, tuple[int, str, str]] = {}
MERGED: dict[int, int] = {}
for customer in CUSTOMERS:
    MERGED[customer[0]] = KEPT.setdefault(customer[1], customer)[0]


def customers():
    return sorted(KEPT.values())


def orders():
    return [(order, MERGED[customer], cents) for order, customer, cents in ORDERS if customer in MERGED]


def orphans():
    return [one for one in ORDERS if one[1] not in MERGED]
