#!/usr/bin/env bash
# Run setup, lint and tests.  Exit status 0: all of them passed.
#
#   scripts/test.sh                     as CI: the fast tests, and the slow ones of tests/ci.toml; always the same ones
#   scripts/test.sh --fast              only the fast tests
#   scripts/test.sh --all [PLACE ...]   all tests, or those of PLACE (tests/instep); draws a new seed, and prints it
#   scripts/test.sh --version           the version of this project
#   scripts/test.sh [--fast] ARGS...    ARGS go to pytest: tests/scripts, -k NAME, -x, ...
#
# Two processes run the tests in parallel (RECOVER_TEST_PROCESSES: another number): most tests wait most of the time.
# (The tests read no terminal; for a debugger run  .venv/bin/python -m pytest --pdb  yourself.)
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
if [[ ${1:-} == --version ]]; then exec "$root/scripts/lib/version.sh" test.sh; fi
"$root/scripts/setup.sh"
cd -- "$root"
export PATH=$root/.venv/bin:$PATH
# The tests start dozens of small processes: one thread each.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

arguments=(-n "${RECOVER_TEST_PROCESSES:-2}" --dist loadgroup --durations=20)
case ${1:-} in
--fast)
    shift
    arguments+=(-m 'not slow')
    ;;
--all)
    shift
    export RECOVER_TESTS=all
    ;;
esac

failed=()
lint() {
    printf '== %s\n' "$*" >&2
    python -m "$@" >&2 || failed+=("$*")
}
lint ruff format --check .
lint ruff check .
lint mypy
lint codespell_lib
if ((${#failed[@]})); then printf '== lint failed; the tests still run\n' >&2; fi

printf '== pytest\n' >&2
# A separate process group, so that an interrupted run can be stopped with all its processes.
set -m
python -m pytest "${arguments[@]}" "$@" </dev/null &
pytest=$!
set +m
trap 'kill -INT -- "-$pytest" 2>/dev/null || true' INT TERM HUP # pytest then cleans up as after Ctrl-C
status=0
wait "$pytest" || status=$?
while kill -0 "$pytest" 2>/dev/null; do # a signal ended `wait`, not pytest
    wait "$pytest" || status=$?
done
left=$(ps -ww -eo pgid=,stat=,pid=,args= | awk -v group="$pytest" '$1 == group && $2 !~ /^Z/ { $1 = $2 = ""; print }' || true)
kill -KILL -- "-$pytest" 2>/dev/null || true
if [[ -n $left ]]; then printf '== killed processes that the tests left behind:\n%s\n' "$left" >&2; fi

if ((${#failed[@]})); then
    printf '== lint failed (see above):%s\n' "$(printf ' [%s]' "${failed[@]}")" >&2
    exit 1
fi
exit "$status"
