#!/usr/bin/env bash
# Make a virtual environment with both sides on the CPU and the three packages in editable mode.
# Usage: setup_env.sh VENV. TORCH_INSTALL_ARGS adds pip options for the torch wheel, e.g.
# PyTorch's CPU index where plain pip would take a CUDA build.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
venv=$1

echo "[setup] torch, vLLM (CPU) and Megatron-Core"
make_venv "$venv" -r requirements/cpu.txt
echo "[setup] Forest"
pip_install "$venv" -r requirements/dev.txt \
  -e shared-schema -e packages/vllm-forest-renderer -e packages/megatron-forest-trainer
touch "$venv/.ready"
