#!/bin/bash
# The tests run isolated from whatever the working directory holds; only their verdict becomes a reward.
cd /
PYTHONPATH=/opt/testing:/tests PYTHONDONTWRITEBYTECODE=1 python3 -m pytest -q -p no:cacheprovider -c /dev/null --rootdir=/tests --noconftest /tests/test_behaviour.py
case $? in
    0) echo 1 > /logs/verifier/reward.txt ;;
    1 | 2) echo 0 > /logs/verifier/reward.txt ;;
    *) echo "pytest itself failed: no reward" >&2 ;;
esac
