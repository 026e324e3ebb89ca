#!/bin/bash
# Builds /app/notes: two commits are lost by a hard reset, and one was made after it.
set -e
export HOME=/tmp GIT_CONFIG_NOSYSTEM=1
git init -q -b main /app/notes
cd /app/notes
git config user.name "Nora Note"
git config user.email nora@example.org
git config gc.auto 0
day=1
commit() {
    export GIT_AUTHOR_DATE="2024-03-0${day}T10:00:00Z" GIT_COMMITTER_DATE="2024-03-0${day}T10:00:00Z"
    git add -A
    git commit -q --author="$2" -m "$1"
    day=$((day + 1))
}
echo "# Notes" > README.md
commit "Begin the notes" "Nora Note <nora@example.org>"
printf 'Soup\n\nWater, carrots, salt.\n' > soup.md
commit "Add the recipe for soup" "Nora Note <nora@example.org>"
printf 'Bread\n\n500 g flour\n350 g water\n100 g salt\n' > bread.md
commit "Add the recipe for bread" "Bert Baker <bert@example.org>"
sed -i 's/100 g salt/10 g salt/' bread.md
commit "Correct the amount of salt" "Sally Salt <sally@example.org>"
git reset -q --hard HEAD~2
printf 'carrots\nflour\n' > shopping.txt
commit "Add a shopping list" "Nora Note <nora@example.org>"
rm /app/make-repository.sh
