#!/usr/bin/env bash
# Patch a Megatron-LM checkout, so that its own pretrain_gpt.py accepts --recover (docs/integrate.md).
#
#   scripts/apply_patches.sh CHECKOUT             apply the patch; does nothing if it is applied already
#   scripts/apply_patches.sh --reverse CHECKOUT   revert the patch; does nothing if it is not applied
#   scripts/apply_patches.sh --check CHECKOUT     change nothing: print what the command without --check would do
#                                                 (also together with --reverse)
#   scripts/apply_patches.sh --help | --version
#
# CHECKOUT is the folder that contains megatron/: a git checkout, or any unpacked tree, such as a wheel's.  All files
# are patched, or none.  It needs git, but no repository.
#
# Exit status: 0 done, nothing to do, or (--check) possible; 1 the files differ from this version's, nothing was
# changed; 2 no checkout, a version without a patch, or a wrong command line.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
me=scripts/apply_patches.sh
if [[ ! -e $root/pyproject.toml ]]; then me='recover-tools patch'; fi # in an installed package

say() { printf 'apply_patches: %s\n' "$*"; }
die() {
    printf 'apply_patches: %s\n' "error: $2" "${@:3}" >&2
    exit "$1"
}

usage() { sed -n "2,/^set /{/^set /d; s/^# \{0,1\}//; s|scripts/apply_patches.sh|$me|; p;}" "${BASH_SOURCE[0]}"; }

# Sets check, reverse, checkout.
read_arguments() {
    check='' reverse='' checkout=''
    local word
    for word in "$@"; do
        case $word in
            --help | -h) usage && exit 0 ;;
            --version) exec "$root/scripts/lib/version.sh" apply_patches.sh ;;
            --check) check=yes ;;
            --reverse) reverse=yes ;;
            -*) die 2 "unknown option $word (--help lists the options)" ;;
            *)
                [[ -z $checkout ]] || die 2 "two checkouts were given, $checkout and $word; give one"
                checkout=$word
                ;;
        esac
    done
    [[ -n $checkout ]] || die 2 "no checkout was given: $me [--check] [--reverse] CHECKOUT"
    [[ -f $checkout/megatron/core/package_info.py ]] ||
        die 2 "$checkout is not a Megatron-LM checkout: it has no megatron/core/package_info.py"
    checkout=$(cd -- "$checkout" && pwd -P)
}

# Prints the version that the checkout states, such as 0.19.0 (tag core_v0.19.0 states 0.19.1).
version_of() {
    local name parts=()
    for name in MAJOR MINOR PATCH; do
        parts+=("$(sed -n "s/^$name *= *\([0-9][0-9]*\).*/\1/p" "$1/megatron/core/package_info.py")")
    done
    local IFS=.
    printf '%s' "${parts[*]}"
}

# Prints the patch for the version $1; fails without one.
patch_for() {
    local versions
    for versions in "$root"/patches/*/versions; do
        if grep -qxF -- "$1" "$versions"; then
            printf '%s' "${versions%/versions}/recover.patch"
            return
        fi
    done
    return 1
}

# Runs git apply in the checkout as in a plain folder: an enclosing repository and the user's git settings have no
# influence.
apply() {
    env -u GIT_DIR -u GIT_WORK_TREE -u GIT_INDEX_FILE GIT_CEILING_DIRECTORIES="$(dirname -- "$checkout")" \
        git -C "$checkout" -c core.autocrlf=false -c apply.ignoreWhitespace=no apply --whitespace=nowarn "$@" "$patch"
}

read_arguments "$@"
command -v git >/dev/null || die 2 'git is not installed; it applies the patch (no repository is needed)'
version=$(version_of "$checkout")
patch=$(patch_for "$version") ||
    die 2 "there is no patch for Megatron $version ($checkout)" \
        "supported versions: $(sort -V "$root"/patches/*/versions | tr '\n' ' ' | sed 's/ $//; s/ /, /g')" \
        'without a patch: use pretrain_gpt_recover.py, which accepts the flags of pretrain_gpt.py (README.md)'

if [[ $reverse ]]; then
    there=() back=(--reverse) done_='not applied' would='would revert' did='reverted'
else
    there=(--reverse) back=() done_='applied already' would='would apply' did='applied'
fi
name=$(basename -- "$(dirname -- "$patch")")
# The patch has enough context to fit only once: it cannot be applied on top of itself.
if apply --check "${there[@]}" 2>/dev/null; then
    say "$name is $done_ in $checkout (Megatron $version): nothing to do"
    exit 0
fi
if ! reasons=$(apply --check "${back[@]}" 2>&1); then
    mapfile -t lines <<<"$reasons"
    die 1 "$checkout states version $version of Megatron, but its files differ from that version's:" \
        "${lines[@]/#/  }" \
        'nothing was changed. These files were modified where the patch applies, or contain parts of it already:' \
        "undo these changes (in a git checkout: git -C $checkout diff), or apply the changes of $patch by hand"
fi
if [[ $check ]]; then
    say "$would $name in $checkout (Megatron $version)"
    exit 0
fi
apply "${back[@]}"
say "$did $name in $checkout (Megatron $version)"
