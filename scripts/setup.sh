#!/usr/bin/env bash
# Make a virtual environment with this project in it; return at once when it is already there and up to date.
#
#   scripts/setup.sh VENV EXTRAS JAX        e.g. scripts/setup.sh .venv dev "jax==0.11.2"
#
# VENV is a folder in the project root, EXTRAS a comma list of extras or "", JAX the requirement for jax itself.
# PYTHON=/path/to/python3 in the environment names the interpreter; otherwise a fitting one is looked for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$1 extras=$2 jax=$3
readonly fits='import sys; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 14))'  # the Pythons that jax has wheels for
export PIP_DISABLE_PIP_VERSION_CHECK=1

# An environment is up to date when its stamp holds this text. The folder is part of it, since an environment that was
# moved along with the project still points to the old place.
wanted=$(printf '%s\n' "$jax" "$PWD"; sha256sum pyproject.toml scripts/setup.sh)
stamp=$venv/.setup-${extras:-runtime}
unfinished=$venv/.setup-unfinished

runs() { "$1" -c "$fits" 2>/dev/null; }

candidates() {
    if [ -n "${PYTHON:-}" ]; then
        printf '%s\n' "$PYTHON"
        return
    fi
    printf '%s\n' python3.12 python3.13 python3.14 python3 python
    # A pyenv shim only runs the version that .python-version names; the others can be called where they lie.
    local path
    for path in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[234]*/bin/python3; do
        if [ -x "$path" ]; then printf '%s\n' "$path"; fi
    done
}

make_venv() {
    local python without_venv=""
    while IFS= read -r python; do
        runs "$python" || continue
        if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
            without_venv=$python
            continue
        fi
        echo "setup: making $venv with $python ($("$python" --version))"
        "$python" -m venv "$venv"
        return
    done < <(candidates)
    if [ -z "${PYTHON:-}" ] && command -v uv >/dev/null; then
        echo "setup: making $venv through uv, which may fetch Python"
        uv venv --seed --python 3.12 "$venv"
        return
    fi
    {
        if [ -n "$without_venv" ]; then
            echo "setup: $without_venv cannot make virtual environments, since its modules venv and ensurepip are missing."
            echo "setup: on Debian or Ubuntu: apt install $("$without_venv" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
        elif [ -n "${PYTHON:-}" ]; then
            echo "setup: this project needs Python 3.12, 3.13 or 3.14, and PYTHON=$PYTHON is none of them."
            echo "setup: unset PYTHON to have a fitting one looked for, or let it name one."
        else
            echo "setup: this project needs Python 3.12, 3.13 or 3.14."
            echo "setup: none was found as python3.12, python3.13, python3.14, python3 or python, in pyenv, or through uv."
            echo "setup: on Debian 13, Ubuntu 24.04 or newer: apt install python3 python3-venv"
            echo "setup: elsewhere: pyenv install 3.12, or install uv (https://docs.astral.sh/uv), and run this again."
        fi
    } >&2
    return 1
}

if [ -f "$stamp" ] && [ "$(<"$stamp")" = "$wanted" ] && runs "$venv/bin/python"; then
    exit 0
fi

# Whatever cannot be trusted is made anew: an interrupted install, a vanished or unfit Python, a folder without pip.
if [ -e "$venv" ] && { [ -e "$unfinished" ] || ! runs "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
    echo "setup: $venv is incomplete or not of a fitting Python: making it anew"
    rm -rf "$venv"
fi
if [ ! -e "$venv" ]; then
    make_venv
fi

echo "setup: installing gdn-jax${extras:+ with extras $extras} and $jax into $venv; the first time takes about a minute"
trap 'exit 130' INT TERM  # leaves the mark of an unfinished install behind
rm -f "$venv"/.setup-*
touch "$unfinished"
# Of pip's report only the names pass, one line each as they are fetched; its errors and warnings go to stderr unchanged.
if ! "$venv/bin/python" -m pip install --no-compile -e ".${extras:+[$extras]}" "$jax" |
    sed -u -n -e 's/^Collecting \([^ ]*\).*/setup:   \1/p' -e 's/^Installing collected packages.*/setup: unpacking/p'; then
    rm -f "$unfinished"  # pip failed in an orderly way: what was there before still works
    echo "setup: the install failed; pip says why above. It needs a package index that can be reached." >&2
    exit 1
fi
printf '%s\n' "$wanted" >"$venv/.setup-runtime"
printf '%s\n' "$wanted" >"$stamp"
rm -f "$unfinished"
echo "setup: $venv is ready"
