# shellcheck shell=bash
# Search for a Python for this project.  Sourced by setup.sh; defines functions, runs nothing.
#
# A candidate counts only if it *runs*: the shims that version managers put on PATH exist for every version that was
# ever installed and fail unless that version is selected.

# Versions for which torch and megatron-core publish wheels, and with which this project is tested.
readonly PYTHON_WANTED='3.12 or 3.13'

# Folders of Pythons that are installed for all users.
system_python_folders=(
    /opt/{conda,miniconda3,miniforge3}/{bin,envs/*/bin}
    /opt/python*/bin /opt/python/*/bin /usr/local/bin /usr/bin /home/linuxbrew/.linuxbrew/bin
)

# Program that runs inside the candidate.  Prints "ok <real path>", or "no <reason>".  The real path is the interpreter
# behind a shim or a virtual environment, so that .venv does not depend on either.
readonly PYTHON_PROBE='
import sys
sys.path[:] = [folder for folder in sys.path if folder]  # not the current folder, which may contain a "venv"
if sys.implementation.name != "cpython":
    print("no", "is " + sys.implementation.name + ", not CPython")
elif not (3, 12) <= sys.version_info[:2] < (3, 14):
    print("no", "is Python %d.%d" % sys.version_info[:2])
elif sys.maxsize < 2**32:
    print("no", "is a 32-bit Python")
else:
    path = sys.executable if sys.prefix == sys.base_prefix else sys._base_executable
    try:
        import ensurepip, venv
    except ImportError as error:
        print("no", "cannot create virtual environments (%s); on Debian and Ubuntu: sudo apt install python%d.%d-venv"
              % ((error,) + tuple(sys.version_info[:2])))
    else:
        print("ok", path)
'

# probe_python CANDIDATE: print "ok <path>" or "no <reason>"; always succeeds.
probe_python() {
    local answer
    if answer=$(timeout 30 "$1" -E -s -c "$PYTHON_PROBE" </dev/null 2>/dev/null) &&
        [[ $answer == ok\ * || $answer == no\ * ]]; then
        printf '%s\n' "$answer"
    else
        printf 'no does not run (a version manager'\''s shim for a version that is not selected?)\n'
    fi
}

# lacks PYTHON: print the functions that a build for an older Linux lacks (uv's and conda's until 2026).
lacks() {
    "$1" -E -s -c 'import os; print(*(n for n in ("pidfd_open", "memfd_create") if not hasattr(os, n)))' </dev/null
}

# list_pythons: print candidates, best first, one path per line, perhaps twice; only RECOVER_PYTHON if it is set.
list_pythons() {
    local name folder path home=${HOME:-/nonexistent}
    if [[ -n ${RECOVER_PYTHON:-} ]]; then
        printf '%s\n' "$RECOVER_PYTHON"
        return
    fi
    for name in python3.12 python3.13 python3 python; do
        type -aP "$name" 2>/dev/null || true # every one on PATH, not only the first
    done
    for folder in \
        "${PYENV_ROOT:-$home/.pyenv}"/versions/*/bin \
        "$home"/.pyenv/versions/*/bin \
        "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$home/.local/share}/uv/python}"/*/bin \
        "${ASDF_DATA_DIR:-$home/.asdf}"/installs/python/*/bin \
        "${MISE_DATA_DIR:-${XDG_DATA_HOME:-$home/.local/share}/mise}"/installs/python/*/bin \
        "${CONDA_PREFIX:-$home/miniconda3}"/bin \
        "$home"/{miniconda3,anaconda3,miniforge3,mambaforge}/{bin,envs/*/bin} \
        "${system_python_folders[@]}"; do
        for path in "$folder"/python3.12 "$folder"/python3.13; do
            if [[ -x $path ]]; then printf '%s\n' "$path"; fi
        done
    done
}

# find_python: print the real path of a usable Python.  Fails, with the reason and the remedy on stderr, if there is none.
find_python() {
    local candidate answer tried='' almost=''
    while IFS= read -r candidate; do
        if [[ $tried == *"|$candidate|"* ]]; then continue; fi
        tried+="|$candidate|"
        answer=$(probe_python "$candidate")
        if [[ $answer == ok\ * ]]; then
            printf '%s\n' "${answer#ok }"
            return 0
        fi
        almost+="  ${RECOVER_PYTHON:+RECOVER_PYTHON=}$candidate ${answer#no }"$'\n'
    done < <(list_pythons)
    {
        printf 'setup: no usable Python %s was found.\n' "$PYTHON_WANTED"
        if [[ -n $almost ]]; then printf 'setup: tried:\n%s' "$almost"; fi
        cat <<'TEXT'
setup: install one, then run this again; use one of these:
  Debian, Ubuntu:  sudo apt install python3.12 python3.12-venv     (or 3.13)
  Fedora, RHEL:    sudo dnf install python3.12
  uv:              uv python install 3.12
  pyenv:           pyenv install 3.12
  conda:           conda create --name recover python=3.12
If you have one in another folder, set RECOVER_PYTHON=/path/to/python3.12  (unset: setup searches for one)
TEXT
    } >&2
    return 1
}
