#!/usr/bin/env bash
# Make a virtual environment with both sides on the CPU and the three packages in editable mode.
# Usage: setup_env.sh VENV. TORCH_INSTALL_ARGS adds pip options for the torch wheel, e.g.
# PyTorch's CPU index where plain pip would take a CUDA build.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
python=${PYTHON:-python3.11}
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "[setup] torch (CPU)"
# shellcheck disable=SC2086
"${pip[@]}" ${TORCH_INSTALL_ARGS:-} torch==2.13.0
echo "[setup] vLLM (CPU) and Megatron-Core"
"${pip[@]}" torch==2.13.0 -r requirements/cpu.txt
# The audio packages that vLLM brings do not load beside a CPU torch and break image processors.
"$venv/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec 2>/dev/null || true
"$venv/bin/python" scripts/torchvision_beside_cpu_torch.py
echo "[setup] Forest"
"${pip[@]}" torch==2.13.0 -r requirements/dev.txt \
  -e shared-schema -e packages/vllm-forest-renderer -e packages/megatron-forest-trainer
touch "$venv/.ready"
