#!/usr/bin/env bash
# Create .venv in this checkout and install recover_megatron into it, with all packages for training and tests.
#
#   scripts/setup.sh             or --version
#
# Safe to run at any time, from any folder: it returns at once if nothing has changed, repairs an interrupted
# installation, and waits for another running setup.  It writes only inside the checkout (pip has its own cache).
#
# Environment (stored in .venv, so later runs and the other scripts need not repeat it; `rm -r .venv` deletes it):
#   RECOVER_PYTHON=PATH       use this Python (3.12 or 3.13) instead of searching for one
#   RECOVER_CONSTRAINTS=FILE  version pins instead of scripts/constraints.txt; /dev/null: any that pyproject.toml allows
#   RECOVER_TORCH=keep        use the torch (and other packages) of RECOVER_PYTHON, as in a vendor's GPU container:
#                             .venv sees its packages, and torch is pinned to the installed version
# pip's own variables (PIP_INDEX_URL, PIP_NO_CACHE_DIR, ...) apply.
set -euo pipefail

scripts=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
root=$(dirname -- "$scripts")
if [[ ${1:-} == --version ]]; then exec "$scripts/lib/version.sh" setup.sh; fi
venv=$root/.venv
python=$venv/bin/python
state=$venv/.setup-state     # "installing" while pip writes, then the fingerprint of what is installed
choices=$venv/.setup-choices # settings of .venv, a line each: checkout, Python, RECOVER_TORCH, RECOVER_CONSTRAINTS
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
# the settings of this run: torch, own_constraints (empty: the default), constraints.
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

# Prints a hash of everything that .venv depends on.
fingerprint() {
    {
        printf '%s\n' "$root" "$torch" "$constraints"
        "$python" -I -c 'import sys; print(sys.version)' </dev/null || return 1
        cat -- "$root/pyproject.toml" "$constraints"
    } | sha256sum | cut -d ' ' -f 1
}

# True if .venv was created for this checkout and the settings of this run.  (The scripts of a virtual environment
# contain its path, so a checkout that was moved or copied needs a new one.)
made_for_this() {
    [[ $made_root == "$root" && $made_torch == "$torch" ]] || return 1
    [[ -z ${RECOVER_PYTHON:-} || $(probe_python "$RECOVER_PYTHON") == "ok $made_base" ]]
}

up_to_date() {
    local now
    [[ -f $state && -x $python ]] && made_for_this || return 1
    now=$(fingerprint 2>/dev/null) && [[ $now == "$(<"$state")" ]]
}

# True if .venv works, and the run that created it finished: another `pip install` into it is enough.
reusable() {
    [[ -f $state && $(<"$state") != installing && -x $python ]] && made_for_this || return 1
    [[ $(probe_python "$python") == ok\ * ]] && "$python" -I -m pip --version >/dev/null 2>&1 </dev/null
}

# make_venv BASE: create an empty virtual environment.  The setup files stay: another run may be waiting for the lock.
make_venv() {
    local options=()
    find "$venv" -mindepth 1 -maxdepth 1 ! -name '.setup-*' -exec rm -rf -- {} +
    if [[ $torch == keep ]]; then options+=(--system-site-packages); fi
    say "creating .venv with $1"
    "$1" -I -m venv "${options[@]}" "$venv" </dev/null >&2 ||
        die "$1 could not create a virtual environment (see above)." \
            "On Debian and Ubuntu install python3.12-venv; or use another Python: RECOVER_PYTHON=/path/to/python3.12"
}

# pins FILE: write the constraints for pip.  With RECOVER_TORCH=keep the version of the installed torch replaces ours.
pins() {
    local version
    if [[ $torch != keep ]]; then
        cat -- "$constraints" >"$1"
        return
    fi
    # pip's idea of the version: torch.__version__ may have a "+cu130" that its metadata lacks.
    version=$("$python" -I -c 'import torch, importlib.metadata; print(importlib.metadata.version("torch"))' \
        </dev/null 2>/dev/null) ||
        die "RECOVER_TORCH=keep, but the Python of .venv cannot import torch." \
            "Set RECOVER_PYTHON=/path/to/python3 to a Python that has torch (not one of a virtual environment)."
    say "keeping torch $version"
    {
        grep -v '^torch==' -- "$constraints" || true
        printf 'torch==%s\n' "$version"
    } >"$1"
}

# Lines of pip's output that are shown: slow steps, that is large files and the installation.  The log has all lines.
shown='(Downloading|Using cached) .*\(([0-9]{3,}[.0-9]* MB|[.0-9]+ GB)\)|Installing collected packages'

install() {
    local status=0
    say "installing recover_megatron and its packages (first time: about 3 GB to download, 6 GB on disk, some minutes)"
    pins "$venv/.setup-pins"
    # These variables would make pip write, or look for installed packages, outside .venv.
    env -u PYTHONPATH -u PYTHONHOME -u PIP_USER -u PIP_TARGET -u PIP_PREFIX -u PIP_ROOT \
        "$python" -m pip install --no-input --disable-pip-version-check --progress-bar off \
        --constraint "$venv/.setup-pins" --editable "${root}[dev]" </dev/null 2>&1 | tee -- "$log" |
        { grep --line-buffered -E "$shown" || true; } | sed -u 's/^ */setup:   /; s/ packages: .*/ packages/' >&2 ||
        status=$?
    if ((status != 0)); then
        tail -n 15 -- "$log" | sed 's/^/  /' >&2
        die "pip failed (status $status); the end of its output is above, the complete output in $log" \
            "No network or no package index? Set pip's PIP_INDEX_URL or PIP_PROXY.  Disk full? About 6 GB are needed here." \
            "Then run this again: it starts over; pip's cache keeps the downloads."
    fi
}

main() {
    read_choices
    if up_to_date; then return 0; fi
    [[ $(uname -s) == Linux ]] || die "this script needs Linux; this machine runs $(uname -s)."
    [[ -r $constraints ]] || die "cannot read the version pins in $constraints"
    [[ -z $torch || $torch == keep ]] || die "RECOVER_TORCH=$torch is not supported; the only value is: keep"
    if [[ -d $venv && ! -e $lock && -n $(ls -A -- "$venv") ]]; then
        die ".venv exists and was not created by this script; nothing was changed." \
            "Move it away and run this again, or install into it yourself:  .venv/bin/python -m pip install -e '.[dev]'"
    fi
    if ! { mkdir -p -- "$venv" && : >>"$lock"; } 2>/dev/null; then die "cannot write in $root"; fi

    exec 9>>"$lock"
    if ! flock --nonblock 9; then
        say "another setup is running in $root; waiting for it"
        flock 9
        read_choices
        if up_to_date; then return 0; fi
    fi
    local base=$made_base remake='' missing
    if ! reusable; then
        if [[ -f $state && $(<"$state") == installing ]]; then say "the last run was interrupted; starting over"; fi
        if [[ -n ${RECOVER_PYTHON:-} || -z $base || $(probe_python "$base") != ok\ * ]]; then
            base=$(find_python) || exit 1
            missing=$(lacks "$base")
            if [[ $missing ]]; then
                say "note: $base is built for an older Linux and lacks os.${missing// /, os.}." \
                    "It works (docs/compatibility.md describes the fallback); a newer build of it has them."
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
