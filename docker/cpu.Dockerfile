# Headway for CPUs: the broker's checks, learner and workers with the embedded engine.
#   docker build -f docker/cpu.Dockerfile -t headway:cpu .
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
# Some dependencies have no wheels. Debian's compiler needs no pin: nothing of it stays in the image.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/headway
ENV PATH=/opt/headway/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
# torch goes first and alone: once a CPU build is there, nothing pulls the CUDA one.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt ./
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY .namespace/ .namespace/
COPY algorithms/ algorithms/
COPY broker/ broker/
COPY deploy/ deploy/
COPY learner/ learner/
COPY rollout_workers/ rollout_workers/
COPY weightsync/ weightsync/
# More extras of Headway, such as ray,wandb
ARG EXTRAS=""
RUN pip install --no-cache-dir -c constraints.txt ".[plots,reasoning-gym,top${EXTRAS:+,$EXTRAS}]"

FROM python:${PYTHON}
# Probes of KubeRay ask with wget.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 1000 --create-home headway && install -d -o headway -g headway /work
COPY --from=build /opt/headway /opt/headway
ENV PATH=/opt/headway/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /work
USER 1000:1000
CMD ["headway", "--help"]
