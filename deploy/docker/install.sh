#!/bin/sh
# Fills /opt/flexmarl, the virtual environment of an image, in two layers: a change of code then
# installs no dependency anew. Wheels that lie in deploy/docker/wheels are taken before any index's.
#
#   install.sh dependencies EXTRA...    what the package and these extras need, as pinned
#   install.sh package                  the package itself
set -eu
venv=/opt/flexmarl
case $1 in
dependencies)
  shift
  python3 -m venv "$venv"
  python3 deploy/docker/requirements.py "$@" > /tmp/requirements.txt
  set -- -c constraints.txt -r /tmp/requirements.txt
  ;;
package)
  set -- --no-deps .
  ;;
*)
  echo "install.sh: dependencies EXTRA... or package" >&2
  exit 2
  ;;
esac
# PIP_ARGS is a list of words.
# shellcheck disable=SC2086
"$venv/bin/python" -m pip install --no-cache-dir --disable-pip-version-check \
  --find-links deploy/docker/wheels ${PIP_ARGS:-} "$@"
