#!/usr/bin/env bash
# Makes a virtual environment that holds everything of requirements-cpu.lock, and dfirst itself (editable).
# Usage: install.sh VENV [PYTHON]. Safe to run again: what is there already is kept.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
venv=${1:?usage: install.sh VENV [PYTHON]}
python=${2:-python3.11}
lock="$root/requirements-cpu.lock"
# PyTorch's own index of CPU wheels, for set-ups whose package index does not carry the pinned build.
torch_index=https://download.pytorch.org/whl/cpu

die() {
    echo "error: $*" >&2
    exit 1
}

# progress TITLE LOG COMMAND...: runs the command with its output in LOG and says every 5 seconds how far it is.
# pip names a package when it fetches it; one that is installed has a directory of its own in the environment.
progress() {
    local title=$1 log=$2 started=$SECONDS
    shift 2
    "$@" >"$log" 2>&1 &
    worker=$!
    trap 'kill "$worker" 2>/dev/null || true' EXIT
    while kill -0 "$worker" 2>/dev/null; do
        sleep 1
        if (((SECONDS - started) % 5 == 0)); then
            printf '  %s: %d s, %d fetched, %d in place\n' "$title" $((SECONDS - started)) \
                "$(grep -c '^Collecting' "$log")" \
                "$(find "$venv"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' | wc -l)"
        fi
    done
    trap - EXIT
    wait "$worker" && printf '  %s: done in %d s\n' "$title" $((SECONDS - started))
}

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    die "'$python' does not run; install Python 3.11, or name it: make venv PYTHON=/path/to/python3.11"
[ "$version" = 3.11 ] ||
    die "'$python' is Python $version, and the lock file is for 3.11; name one: make venv PYTHON=/path/to/python3.11"

bash "$root/tests/ci/system_packages.sh" "$python"

if [ ! -x "$venv/bin/python" ]; then
    echo "Creating $venv with Python $version"
    "$python" -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip install --no-deps --no-input --progress-bar off --disable-pip-version-check)
log="$venv/install.log"

torch=$(grep '^torch==' "$lock")
if ! progress "installing $torch" "$log" "${pip[@]}" "$torch"; then
    echo "  the configured package index has no $torch; trying PyTorch's own at $torch_index"
    progress "installing $torch" "$log" "${pip[@]}" --index-url "$torch_index" "$torch" ||
        { tail -n 15 "$log" >&2; die "$torch could not be installed; the whole log is $log"; }
fi
progress "installing $(grep -c '==' "$lock") packages" "$log" "${pip[@]}" -r "$lock" ||
    { tail -n 15 "$log" >&2; die "$lock could not be installed; the whole log is $log"; }
progress "installing dfirst" "$log" "${pip[@]}" --no-build-isolation -e "$root" ||
    { tail -n 15 "$log" >&2; die "dfirst itself could not be installed; the whole log is $log"; }

"$venv/bin/python" -c 'import mooncake.engine' ||
    die "the Mooncake engine does not import; its system libraries are missing: see above which, and install them"
echo "Ready: $venv ($("$venv/bin/python" --version))"
