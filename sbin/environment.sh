# shellcheck shell=bash
# Sourced by quickstart, test and check: the virtual environment .venv of this clone. Prints nothing but what is done.

cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." || exit 1
readonly venv=$PWD/.venv

stop() { # one line: what is missing, and the next move
    printf '%s: error: %s\n' "${0##*/}" "$1" >&2
    exit 2
}

# make_environment EXTRA PYTHON: .venv with the project (editable) and its extra ("", "test" or "dev"); quick when it is there
make_environment() {
    local extra=$1 python=$2 state enough mark
    command -v -- "$python" >/dev/null || stop "there is no $python on PATH; install Python 3.10 or newer"
    if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
            stop "$python is $("$python" --version 2>&1); Python 3.10 or newer is needed, name it with HPC_PYTHON=..."
        "$python" -c 'import ensurepip, venv' 2>/dev/null ||
            stop "$python cannot make a virtual environment; install its venv module (Debian, Ubuntu: python3-venv)"
        echo "making the environment .venv with $("$python" --version 2>&1)"
        "$python" -m venv --clear "$venv" || stop "$python -m venv failed; its words stand above"
    fi
    state=$(cksum <pyproject.toml | tr ' ' -)
    case $extra in # what one extra installs, the larger ones install too
    '') enough='project test dev' ;;
    test) enough='test dev' ;;
    *) enough=$extra ;;
    esac
    for mark in $enough; do
        [ ! -e "$venv/.installed-$mark-$state" ] || return 0
    done
    "$venv/bin/python" -c 'import torch' 2>/dev/null || install_torch
    echo "installing the project${extra:+ with what its ${extra}s need}"
    "$venv/bin/python" -m pip install --quiet --editable ".${extra:+[$extra]}" ||
        stop "pip could not install the project; its words stand above"
    rm -f -- "$venv"/.installed-*
    : >"$venv/.installed-${extra:-project}-$state"
}

# With a GPU the newest torch; without one the release that the tests were last run with, where pip's index has it.
install_torch() {
    local torch
    if ! nvidia-smi -L >/dev/null 2>&1; then
        echo 'installing torch==2.13.0'
        "$venv/bin/python" -m pip install --quiet torch==2.13.0 2>/dev/null && return 0
        echo 'pip could not install that one'
    fi
    torch='torch>=2.8'
    echo "installing $torch"
    "$venv/bin/python" -m pip install --quiet "$torch" || stop "pip could not install $torch; its words stand above"
}
