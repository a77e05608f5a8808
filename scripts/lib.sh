# Shell functions that the scripts share; sourced from the repository's root.

python=${PYTHON:-python3.11}

pip_install() { # VENV PIP-ARGUMENTS...: install there, leaving torch as it is
  local venv=$1; shift
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 "$@"
}

make_venv() { # VENV PIP-ARGUMENTS...: a virtual environment with a CPU torch and what pip is asked for
  local venv=$1; shift
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  # torch comes first and alone: a resolver that picks it freely takes a CUDA build of several GB.
  # shellcheck disable=SC2086
  pip_install "$venv" ${TORCH_INSTALL_ARGS:-}
  pip_install "$venv" "$@"
  # The audio packages that vLLM brings do not load beside a CPU torch and break image processors.
  "$venv/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec 2>/dev/null || true
  "$venv/bin/python" scripts/torchvision_beside_cpu_torch.py
}
