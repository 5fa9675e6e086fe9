#!/usr/bin/env bash
# Installs the system libraries that the Mooncake engine loads, graphviz for the diagrams, and Python's venv
# module, where this user may; elsewhere says which are missing. It fails for none of them: whether the engine
# imports is what counts, and that is checked at the end of the installation.
# Usage: system_packages.sh PYTHON
set -euo pipefail

python=${1:?usage: system_packages.sh PYTHON}
missing=()
libraries=$(PATH="$PATH:/sbin:/usr/sbin" ldconfig -p)

# library SONAME PACKAGE
library() {
    [[ $libraries == *"$1"* ]] || missing+=("$2")
}

library libibverbs.so.1 libibverbs1
library librdmacm.so.1 librdmacm1
library libnuma.so.1 libnuma1
library libcurl.so.4 libcurl4
command -v dot >/dev/null || missing+=(graphviz)
"$python" -c 'import ensurepip' 2>/dev/null || missing+=(python3.11-venv)

if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi
by_hand="apt-get install --no-install-recommends ${missing[*]}"

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    as_root=(sudo -n)
fi
if ! command -v apt-get >/dev/null || ! "${as_root[@]}" true 2>/dev/null; then
    echo "Missing system packages: ${missing[*]}. Not allowed to install them here; as root, run: $by_hand"
    exit 0
fi

echo "Installing system packages: ${missing[*]}"
as_root+=(env DEBIAN_FRONTEND=noninteractive apt-get -q -o Dpkg::Use-Pty=0)
# The package lists of a fresh machine are empty, and old ones name files that are gone.
if ! "${as_root[@]}" update || ! "${as_root[@]}" install -y --no-install-recommends "${missing[@]}"; then
    echo "The system packages could not be installed; as root, run: $by_hand"
fi
