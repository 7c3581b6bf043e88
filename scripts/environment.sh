# Sourced by the programs of this folder: `prepare_environment base|dev` makes .venv in the checkout ready.
#
# The first call creates .venv and installs the package with the versions in constraints.txt; later calls compare a
# stamp and do nothing, until pyproject.toml or the constraints change. Everything is said on stderr, so that the
# output of the program that follows stays clean. PYTHON names another interpreter than python3.

root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)"
venv="$root/.venv"

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$1" >&2
    exit 2
}

create_venv() {
    local python="${PYTHON:-python3}"
    command -v "$python" >/dev/null || fail "no $python found; install Python 3.11 or later (Debian: apt install python3 python3-venv)"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$("$python" --version) is too old: Python 3.11 or later is needed; name one with PYTHON=python3.12 $0"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python cannot create virtual environments; install that part of Python (Debian: apt install python3-venv)"
    "$python" -m venv --clear "$venv"
}

prepare_environment() {
    local extra="$1" requirement="$root" wanted
    [ "$extra" = base ] || requirement="$root[$extra]"
    wanted="$(cat "$root/pyproject.toml" "$root/scripts/constraints.txt" | sha256sum | cut -d ' ' -f 1) $root"
    [ "$(cat "$venv/.dspark-$extra" 2>/dev/null)" != "$wanted" ] || return 0
    echo "setting up $venv (once; PyTorch is a large download, expect some minutes)" >&2
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || create_venv
    "$venv/bin/python" -m pip install --disable-pip-version-check -c "$root/scripts/constraints.txt" -e "$requirement" >&2 ||
        fail "the installation into $venv failed, see above; running the same command again goes on from there"
    echo "$wanted" >"$venv/.dspark-base"
    echo "$wanted" >"$venv/.dspark-$extra"
}
