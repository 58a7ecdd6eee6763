#!/usr/bin/env bash
# Make .venv in this checkout and install recover_megatron into it, with everything that trains and tests it.
#
#   scripts/setup.sh             or --version
#
# Safe to run at any time, from any folder: it returns at once when nothing changed, repairs what an interrupted run
# left, and waits for another run of itself.  It writes inside the checkout only (pip keeps its own cache).
#
# Environment (remembered in .venv, so that later runs and the other scripts need not repeat it; `rm -r .venv` forgets):
#   RECOVER_PYTHON=PATH       use this Python (3.12 or 3.13) instead of looking for one
#   RECOVER_CONSTRAINTS=FILE  other version pins than scripts/constraints.txt; /dev/null: whatever pyproject.toml allows
#   RECOVER_TORCH=keep        use the torch (and anything else) that RECOVER_PYTHON already has, as in a vendor's GPU
#                             container: .venv sees its packages, and torch is pinned to the version found there
# pip's own variables (PIP_INDEX_URL, PIP_NO_CACHE_DIR, ...) apply.
set -euo pipefail

scripts=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
root=$(dirname -- "$scripts")
if [[ ${1:-} == --version ]]; then exec "$scripts/lib/version.sh" setup.sh; fi
venv=$root/.venv
python=$venv/bin/python
state=$venv/.setup-state     # "installing" while pip writes, then the fingerprint of what is installed
choices=$venv/.setup-choices # what .venv was made for, a line each: checkout, Python, RECOVER_TORCH, RECOVER_CONSTRAINTS
lock=$venv/.setup-lock
log=$venv/setup.log

# shellcheck source=scripts/lib/find_python.sh
source "$scripts/lib/find_python.sh"

say() { printf 'setup: %s\n' "$*" >&2; }
die() {
    printf 'setup: %s\n' "error: $1" "${@:2}" >&2
    exit 1
}

# Sets made_root, made_base, made_torch, made_constraints (empty without a .venv), and from them and the environment
# the choices of this run: torch, own_constraints (empty: ours), constraints.
read_choices() {
    made_root='' made_base='' made_torch='' made_constraints=''
    if [[ -f $choices ]]; then
        { IFS= read -r made_root && IFS= read -r made_base && IFS= read -r made_torch && IFS= read -r made_constraints; } \
            <"$choices" || made_root=''
    fi
    torch=${RECOVER_TORCH-$made_torch}
    own_constraints=${RECOVER_CONSTRAINTS-$made_constraints}
    if [[ $own_constraints == [!/]* ]]; then own_constraints=$PWD/$own_constraints; fi
    constraints=${own_constraints:-$scripts/constraints.txt}
}

# What .venv was made from.
fingerprint() {
    {
        printf '%s\n' "$root" "$torch" "$constraints"
        "$python" -I -c 'import sys; print(sys.version)' </dev/null || return 1
        cat -- "$root/pyproject.toml" "$constraints"
    } | sha256sum | cut -d ' ' -f 1
}

# .venv belongs to this checkout and to the choices of this run.  (The scripts of a virtual environment carry its path,
# so a checkout that was moved or copied needs a new one.)
made_for_this() {
    [[ $made_root == "$root" && $made_torch == "$torch" ]] || return 1
    [[ -z ${RECOVER_PYTHON:-} || $(probe_python "$RECOVER_PYTHON") == "ok $made_base" ]]
}

up_to_date() {
    local now
    [[ -f $state && -x $python ]] && made_for_this || return 1
    now=$(fingerprint 2>/dev/null) && [[ $now == "$(<"$state")" ]]
}

# .venv works, and the run that made it came to its end: another `pip install` into it is enough.
reusable() {
    [[ -f $state && $(<"$state") != installing && -x $python ]] && made_for_this || return 1
    [[ $(probe_python "$python") == ok\ * ]] && "$python" -I -m pip --version >/dev/null 2>&1 </dev/null
}

# make_venv BASE: an empty virtual environment.  Our own files stay: another run may be waiting for the lock.
make_venv() {
    local options=()
    find "$venv" -mindepth 1 -maxdepth 1 ! -name '.setup-*' -exec rm -rf -- {} +
    if [[ $torch == keep ]]; then options+=(--system-site-packages); fi
    say "making .venv with $1"
    "$1" -I -m venv "${options[@]}" "$venv" </dev/null >&2 ||
        die "$1 could not make a virtual environment (see above)." \
            "On Debian and Ubuntu install python3.12-venv; or name another Python: RECOVER_PYTHON=/path/to/python3.12"
}

# pins FILE: write the constraints for pip.  Where torch is the user's own, its version replaces ours.
pins() {
    local version
    if [[ $torch != keep ]]; then
        cat -- "$constraints" >"$1"
        return
    fi
    # pip's idea of the version: torch.__version__ may have a "+cu130" that its metadata lacks.
    version=$("$python" -I -c 'import torch, importlib.metadata; print(importlib.metadata.version("torch"))' \
        </dev/null 2>/dev/null) ||
        die "RECOVER_TORCH=keep, but the Python behind .venv has no torch that can be imported." \
            "Name the Python that has it: RECOVER_PYTHON=/path/to/python3 (not one of a virtual environment)."
    say "keeping torch $version"
    {
        grep -v '^torch==' -- "$constraints" || true
        printf 'torch==%s\n' "$version"
    } >"$1"
}

# Of pip's output, what takes time: large files, and the unpacking of all.  The rest goes to the log alone.
shown='(Downloading|Using cached) .*\(([0-9]{3,}[.0-9]* MB|[.0-9]+ GB)\)|Installing collected packages'

install() {
    local status=0
    say "installing recover_megatron and what it needs (first time: about 3 GB to download, 6 GB on disk, some minutes)"
    pins "$venv/.setup-pins"
    # These would make pip write, or look for what is already there, outside .venv.
    env -u PYTHONPATH -u PYTHONHOME -u PIP_USER -u PIP_TARGET -u PIP_PREFIX -u PIP_ROOT \
        "$python" -m pip install --no-input --disable-pip-version-check --progress-bar off \
        --constraint "$venv/.setup-pins" --editable "${root}[dev]" </dev/null 2>&1 | tee -- "$log" |
        { grep --line-buffered -E "$shown" || true; } | sed -u 's/^ */setup:   /; s/ packages: .*/ packages/' >&2 ||
        status=$?
    if ((status != 0)); then
        tail -n 15 -- "$log" | sed 's/^/  /' >&2
        die "pip failed (status $status); the end of its output is above, all of it in $log" \
            "No network or no package index? Set pip's PIP_INDEX_URL or PIP_PROXY.  Disk full? About 6 GB are needed here." \
            "Then run this again: it starts afresh; pip's cache keeps what was downloaded."
    fi
}

main() {
    read_choices
    if up_to_date; then return 0; fi
    [[ $(uname -s) == Linux ]] || die "this runs on Linux; this machine says $(uname -s)."
    [[ -r $constraints ]] || die "cannot read the version pins in $constraints"
    [[ -z $torch || $torch == keep ]] || die "RECOVER_TORCH=$torch is not known; it can be: keep"
    if [[ -d $venv && ! -e $lock && -n $(ls -A -- "$venv") ]]; then
        die ".venv exists and was not made by this script; it is left as it is." \
            "Move it away and run this again, or install into it yourself:  .venv/bin/python -m pip install -e '.[dev]'"
    fi
    if ! { mkdir -p -- "$venv" && : >>"$lock"; } 2>/dev/null; then die "cannot write in $root"; fi

    exec 9>>"$lock"
    if ! flock --nonblock 9; then
        say "another run of this script is at work in $root; waiting for it"
        flock 9
        read_choices
        if up_to_date; then return 0; fi
    fi
    local base=$made_base remake='' missing
    if ! reusable; then
        if [[ -f $state && $(<"$state") == installing ]]; then say "the last run did not come to its end; starting afresh"; fi
        if [[ -n ${RECOVER_PYTHON:-} || -z $base || $(probe_python "$base") != ok\ * ]]; then
            base=$(find_python) || exit 1
            missing=$(lacks "$base")
            if [[ $missing ]]; then
                say "note: $base was built for an older Linux, without os.${missing// /, os.}." \
                    "It will do (docs/compatibility.md says what is done instead); a newer build of it has them."
            fi
        fi
        remake=yes
    fi
    printf 'installing\n' >"$state"
    printf '%s\n' "$root" "$base" "$torch" "$own_constraints" >"$choices"
    if [[ $remake ]]; then make_venv "$base"; fi
    install
    fingerprint >"$state.new"
    mv -f -- "$state.new" "$state"
    say "done: $("$python" -I --version) in .venv"
}

main
