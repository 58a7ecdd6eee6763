#!/usr/bin/env bash
# SLURM 22.05.8 (Debian 12), python-hostlist 2.3.0, ClusterShell 1.9.3: the names of a node list with two brackets,
# and with three, such as rack, chassis and slot.  SLURM numbers the nodes of a step in the order of the list, and job
# scripts and launchers number them by one of these three.
#
# Guess: the last bracket varies fastest in all three, so node 2 is the same host for each of them.
# Seen: with two brackets it does.  With three, SLURM lets the last vary fastest, then the first, and then the one in the
#   middle; the two libraries count from the right.  So nodes 2 to 5 of 8 are other hosts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
version=22.05.8-4+deb12u3
mkdir "$folder/debs"
(cd "$folder/debs" && apt-get download -q "slurm-client=$version" "slurm-wlm-basic-plugins=$version") >/dev/null 2>&1 || exit 2
for package in "$folder"/debs/*.deb; do dpkg -x "$package" "$folder/slurm" || exit 2; done
"${PYTHON:-python3.12}" -m venv "$folder/venv" &&
    "$folder/venv/bin/pip" install -q --disable-pip-version-check python-hostlist==2.3.0 ClusterShell==1.9.3 || exit 2

printf 'ClusterName=c\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=n1\n' >"$folder/slurm.conf"
libraries=$(dirname "$(find "$folder/slurm" -name libslurmfull.so)")
scontrol() {
    SLURM_CONF=$folder/slurm.conf LD_LIBRARY_PATH=$libraries "$folder/slurm/usr/bin/scontrol" "$@"
}
scontrol --version || exit 2

cat >"$folder/read.py" <<'PYTHON'
import sys

import hostlist
from ClusterShell.NodeSet import NodeSet

print(*(hostlist.expand_hostlist if sys.argv[1] == "hostlist" else NodeSet)(sys.argv[2]))
PYTHON

declare -A found
for list in 'a[1-2]b[1-2]' 'a[1-2]b[1-2]c[1-2]'; do
    found[slurm]=$(scontrol show hostnames "$list" | tr '\n' ' ')
    found[slurm]=${found[slurm]% }
    for library in hostlist clustershell; do
        found[$library]=$("$folder/venv/bin/python" "$folder/read.py" "$library" "$list")
    done
    for reader in slurm hostlist clustershell; do printf '%-20s %-13s %s\n' "$list" "$reader" "${found[$reader]}"; done
    if [[ $list == *c* ]]; then break; fi
    [[ ${found[slurm]} == 'a1b1 a1b2 a2b1 a2b2' && ${found[hostlist]} == "${found[slurm]}" ]] || exit 1
    [[ ${found[clustershell]} == "${found[slurm]}" ]] || exit 1
done
[[ ${found[slurm]} == 'a1b1c1 a1b1c2 a2b1c1 a2b1c2 a1b2c1 a1b2c2 a2b2c1 a2b2c2' ]] || exit 1
[[ ${found[hostlist]} == 'a1b1c1 a1b1c2 a1b2c1 a1b2c2 a2b1c1 a2b1c2 a2b2c1 a2b2c2' ]] || exit 1
[[ ${found[clustershell]} == "${found[hostlist]}" ]] || exit 1
