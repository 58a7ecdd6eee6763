#!/usr/bin/env bash
# megatron-core 0.19.2: the version that an installed wheel says of itself.
#
# Guess: the wheel's `megatron.core.__version__` is the version of the package, "0.19.2", wherever it is installed.
# Seen (torch 2.15.0, numpy 2.5.5): in a virtual environment inside of a git repository, as many have one, it is
#   "0.19.2+REVISION", with the revision of that repository: the package asks git in its own folder.  So the same wheel
#   has another version on another host, and after each commit of the user's own.  The metadata of the package says
#   0.19.2.  Outside of a repository, or with NO_VCS_VERSION=1, the two are alike.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
index=()
if curl -fsI -m 10 https://download.pytorch.org/whl/cpu/torch/ >/dev/null 2>&1; then
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
fi
git init -q "$folder/users-own"
commit() { git -C "$folder/users-own" -c user.name=user -c user.email=user@example.org commit -q --allow-empty -m "$1"; }
commit one
"${PYTHON:-python3.12}" -m venv "$folder/users-own/venv" &&
    "$folder/users-own/venv/bin/pip" install -q --disable-pip-version-check "${index[@]}" \
        torch==2.15.0 numpy==2.5.5 megatron-core==0.19.2 || exit 2

cd /
version() { "$folder/users-own/venv/bin/python" -W ignore -c 'import megatron.core; print(megatron.core.__version__)' 2>/dev/null; }
revision() { git -C "$folder/users-own" rev-parse --short HEAD; }
first=$(version) one=$(revision)
commit two
second=$(version) two=$(revision)
plain=$(NO_VCS_VERSION=1 version)
echo "revision $one: $first; revision $two: $second; with NO_VCS_VERSION=1: $plain"
[[ $first == "0.19.2+$one" && $second == "0.19.2+$two" && $plain == 0.19.2 ]]
