import json
from pathlib import Path

import pytest

EXPECTED = {
    "requests": 3919,
    "damaged": 81,
    "errors": 209,
    "bytes": 149041743,
    "top_clients": [["10.0.0.3", 1147], ["10.0.0.14", 774], ["10.0.0.15", 726]],
    "slowest_hour": "2024-05-01T09",
}


@pytest.fixture(scope="module")
def report():
    return json.loads(Path("/app/report.json").read_text())


def test_keys(report):
    assert set(report) == set(EXPECTED)


@pytest.mark.parametrize("key", EXPECTED)
def test_figure(report, key):
    assert report[key] == EXPECTED[key]
