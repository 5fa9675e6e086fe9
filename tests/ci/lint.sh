#!/usr/bin/env bash
# Lint, formatting and types. Usage: lint.sh VENV
set -euo pipefail

cd "$(dirname "$0")/../.."
venv=$(cd "${1:?usage: lint.sh VENV}" && pwd)

# shown only when it fails: a clean tree is silent but for one line a check.
check() {
    local output
    if ! output=$("$@" 2>&1); then
        printf '%s\nerror: failed: %s\n' "$output" "$*" >&2
        exit 1
    fi
    printf 'ok  %s\n' "${output##*$'\n'}"
}

check "$venv/bin/ruff" check .
check "$venv/bin/ruff" format --check .

# mypy does not follow the finder of an editable install; links give it the package's tree as it is installed.
tree="$venv/typecheck"
mkdir -p "$tree/dfirst"
for part in protocol spec; do
    ln -sfn "$PWD/$part" "$tree/dfirst/$part"
done
MYPYPATH="$tree" check "$venv/bin/mypy" --config-file pyproject.toml -p dfirst.protocol -p dfirst.spec
