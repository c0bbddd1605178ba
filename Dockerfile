# syntax=docker/dockerfile:1
#
# An image for NVIDIA GPUs with the versions of requirements/gpu.txt. It needs a driver that supports CUDA 13 (580 or
# newer) and the NVIDIA Container Toolkit.
#
#   docker build -t salesrl_trl .
#   mkdir -p runs
#   docker run --rm -it --init --gpus all --ipc host --user "$(id -u):$(id -g)" \
#     -v "$PWD/runs:/opt/salesrl_trl/runs" salesrl_trl accelerate launch recipes/own.py
#
# --ipc host  shares the host's shared memory with NCCL and vLLM; Docker's default of 64 MB is too small
# --user      makes you the owner of files in runs/; without it, uid 1000 needs write access there
#
# Models from the Hub: add -v "$HOME/.cache/huggingface:/home/salesrl/.cache/huggingface"; for gated models also -e HF_TOKEN.
# Stop and resume: with `scripts/supervise.sh -- accelerate launch RECIPE --resume_from_checkpoint auto` as the command,
# `docker stop --time 300` lets the run save a checkpoint. Without supervise.sh, the container ends with the launcher.
# Behind a mirror of PyPI: docker build --build-arg UV_DEFAULT_INDEX=https://MIRROR/simple -t salesrl_trl .

# PyPI's torch 2.13.0 is built for CUDA 13.0. DeepSpeed and FlashInfer compile kernels on first use, which needs nvcc.
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04
# The release used by scripts/packages.sh.
ARG UV_IMAGE=ghcr.io/astral-sh/uv:0.13.9

# hadolint ignore=DL3006
FROM ${UV_IMAGE} AS uv

# hadolint ignore=DL3006
FROM ${CUDA_IMAGE}

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# Triton, DeepSpeed and torch.compile call a C++ compiler. Ubuntu's release fixes their versions.
# hadolint ignore=DL3008
RUN apt-get update \
  && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends build-essential ca-certificates \
  && rm -rf /var/lib/apt/lists/*

COPY --from=uv /uv /usr/local/bin/

ARG UV_DEFAULT_INDEX=https://pypi.org/simple
ENV UV_LINK_MODE=copy \
    UV_COMPILE_BYTECODE=1 \
    UV_PYTHON_INSTALL_DIR=/opt/python \
    VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH

# Python 3.11, for which the locks were made, with its headers.
RUN uv venv --python 3.11 "$VIRTUAL_ENV"

WORKDIR /opt/salesrl_trl

# The GPU steps of scripts/install.sh, slowest first: after a change of the code only the last one is rebuilt.
COPY requirements/gpu.txt requirements/gpu.txt
RUN --mount=type=cache,target=/root/.cache/uv uv pip install -r requirements/gpu.txt
# hadolint ignore=DL3059
RUN --mount=type=cache,target=/root/.cache/uv DS_BUILD_OPS=0 uv pip install --no-build-isolation deepspeed==0.19.8 \
  -c requirements/gpu.txt

COPY . .
RUN --mount=type=cache,target=/root/.cache/uv \
  uv pip install --no-build-isolation -c requirements/gpu.txt -e ".[agents,demo,gpu]"

# Training doesn't need root. runs/ and the home folder are world-writable, so that --user works. A uid without a name in
# the image gets its name from USER, which torch reads.
RUN (userdel --remove ubuntu 2>/dev/null || true) \
  && useradd --create-home --uid 1000 salesrl \
  && mkdir -p runs /home/salesrl/.cache/huggingface \
  && chmod 1777 runs /home/salesrl /home/salesrl/.cache /home/salesrl/.cache/huggingface
ENV HOME=/home/salesrl \
    USER=salesrl
USER 1000

# Fails the build if a package can't be imported. Files written by the imports are removed, because --user couldn't write next to them.
RUN folder="$(mktemp -d)" \
  && HOME="$folder" TMPDIR="$folder" HF_HUB_OFFLINE=1 \
  python -c 'import deepspeed, peft, salesrl_trl, torch, transformers, trl, vllm' \
  && rm -rf "$folder"

CMD ["accelerate", "launch", "recipes/own.py"]
