#!/bin/bash
set -euo pipefail
cat > /app/backup.sh <<'END'
#!/bin/bash
# Saves all text files of a folder, compressed.
set -euo pipefail

source=${1:?usage: backup.sh SOURCE TARGET}
target=${2:?usage: backup.sh SOURCE TARGET}
if [[ ! -d $source ]]; then
    printf '%s is not a folder\n' "$source" >&2
    exit 1
fi
source=$(cd -- "$source" && pwd -P && printf x)
source=${source%$'\n'x}
mkdir -p -- "$target"
count=0
while IFS= read -r -d '' file; do
    saved=$target/${file#"$source"/}.gz
    mkdir -p -- "$(dirname -- "$saved")"
    gzip -c < "$file" > "$saved"
    count=$((count + 1))
done < <(find "$source" -type f -name '*.txt' -print0)
printf '%d files saved\n' "$count"
END
