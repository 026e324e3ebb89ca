#!/bin/bash
set -euo pipefail
cd /app/notes
export HOME=/tmp
git config --global --add safe.directory /app/notes
list=$(git rev-parse main)
salt=$(git log -g --format='%H %s' main | sed -n 's/ Correct the amount of salt$//p' | head -n 1)
git reset -q --hard "$salt"
git cherry-pick "$list"
