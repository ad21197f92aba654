#!/bin/sh
# Makes a base image for the services without an image registry: a Debian root file system with
# Python 3.11, imported into the container engine. Needs root and debootstrap.
#
#   deploy/docker/base_image.sh flexmarl-base [MIRROR]
#   BASE=flexmarl-base docker compose build
set -eu
image=${1:?usage: base_image.sh IMAGE [MIRROR]}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" ${2:+"$2"}
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/*
tar -C "$root" -c . | docker import - "$image"
