#!/usr/bin/env bash
# Installs the Debian packages that Sandmill's tests, demo and benchmarks use, where they are missing and we are root.
# A package that can't be had is said, not fatal: what needs it says so again, with the same name.
set -u
runtime=(iproute2 nftables btrfs-progs python3-venv python3-pip git gcc libc6-dev make sqlite3)
peers=(bubblewrap runc)                                  # benchmarks stand beside them
images=(mmdebstrap umoci skopeo docker-registry apache2-utils busybox-static)          # the tests' images are built with them

command -v dpkg-query >/dev/null || { echo "setup: not a Debian-like system; needed: ${runtime[*]} ${peers[*]} ${images[*]}"; exit 0; }
missing=()
for package in "${runtime[@]}" "${peers[@]}" "${images[@]}"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" != 0 ]; then
    echo "setup: missing Debian packages: ${missing[*]}"
    echo "setup: install them with: sudo apt-get install ${missing[*]}"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq || echo "setup: apt-get update failed; trying with the lists that are here"
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null || {
    for package in "${missing[@]}"; do
        apt-get install -y -qq --no-install-recommends "$package" >/dev/null || echo "setup: $package could not be installed"
    done
}
exit 0
