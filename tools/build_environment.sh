#!/bin/sh
# Builds .venv from the lock. `make` runs it as: build_environment.sh STAMP PYTHON...
#
# STAMP is written last: an environment without it was interrupted and is built anew.
# PYTHON... are the interpreters to try in order; the first that is 3.11 is taken.
set -eu

stamp=$1
shift

python=
for candidate in "$@"; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
      >/dev/null 2>&1; then
    python=$candidate
    break
  fi
done

if [ -z "$python" ]; then
  echo "Python 3.11 is needed and $* is not it: install it (on Debian 12:" \
    "apt-get install python3.11 python3.11-venv) or name one: make" \
    "PYTHON=/path/to/python3.11" >&2
  exit 1
fi
if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
  echo "$python has no venv or ensurepip module: install the package" \
    "python3.11-venv (on Debian 12: apt-get install python3.11-venv)" >&2
  exit 1
fi

echo "Building .venv from requirements.txt (2.6 GB, a few minutes) ..."
rm -rf .venv
"$python" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
  --require-hashes --only-binary :all: --requirement requirements.txt
touch "$stamp"
