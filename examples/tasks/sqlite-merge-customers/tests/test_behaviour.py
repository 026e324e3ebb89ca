import sqlite3

import pytest

import original


@pytest.fixture
def db():
    with sqlite3.connect("file:/app/shop.db?mode=ro", uri=True) as connection:
        yield connection
    connection.close()


def test_customers(db):
    assert db.execute("SELECT id, email, name FROM customers ORDER BY id").fetchall() == original.customers()


def test_orders(db):
    assert db.execute("SELECT id, customer_id, cents FROM orders ORDER BY id").fetchall() == original.orders()


def test_orphans(db):
    assert db.execute("SELECT id, customer_id, cents FROM orphans ORDER BY id").fetchall() == original.orphans()


def test_unique(db):
    unique = [row[1] for row in db.execute("PRAGMA index_list(customers)") if row[2]]
    columns = [[info[2] for info in db.execute(f"PRAGMA index_info({name})")] for name in unique]
    assert ["email"] in columns
