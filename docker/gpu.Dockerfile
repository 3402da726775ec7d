# Headway for NVIDIA GPUs, on vLLM's own image: its CUDA, torch and kernels were built for one another, and vLLM 0.26 is
# the version with which Headway ran on GPUs.
#   docker build -f docker/gpu.Dockerfile -t headway:gpu .
ARG VLLM=v0.26.0

FROM python:3.12-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY .namespace/ .namespace/
COPY algorithms/ algorithms/
COPY broker/ broker/
COPY deploy/ deploy/
COPY learner/ learner/
COPY rollout_workers/ rollout_workers/
COPY weightsync/ weightsync/
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM vllm/vllm-openai:${VLLM}
# What the image has stays as it is; all else comes in the versions of constraints.txt.
ARG EXTRAS=""
COPY constraints.txt /tmp/constraints.txt
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m pip list --format=freeze > /tmp/base.txt && \
    awk -F '==' '{name = tolower($1); gsub(/[-_.]+/, "-", name)} NR == FNR {has[name]; next} /==/ && !(name in has)' \
        /tmp/base.txt /tmp/constraints.txt > /tmp/others.txt && \
    python3 -m pip install --no-cache-dir -c /tmp/base.txt -c /tmp/others.txt \
        "$(echo /wheels/*.whl)[plots,reasoning-gym,top${EXTRAS:+,$EXTRAS}]" && \
    rm /tmp/base.txt /tmp/others.txt
# Probes of KubeRay ask with wget.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/*
RUN useradd --non-unique --uid 1000 --create-home headway && install -d -o 1000 -g 1000 /work
ENV PYTHONUNBUFFERED=1
WORKDIR /work
USER 1000:1000
ENTRYPOINT []
CMD ["headway", "--help"]
