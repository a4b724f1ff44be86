# Headrace in a container. For a CPU:
#   docker build -t headrace .
# pip takes torch's CUDA build by default. It brings its own CUDA libraries, so the same image serves NVIDIA GPUs: run it with --gpus all (the
# host needs the driver and NVIDIA's container toolkit). For CPUs alone, torch's CPU build makes the image several GB smaller:
#   docker build -t headrace --build-arg TORCH_INDEX=URL .   (URL: the index of CPU builds that PyTorch's own pages name)
# docs/operating.md has the rest.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
# gcc: the CPU's kernels are compiled for the very machine at first use, and Triton compiles its launchers
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/constraints.txt
ARG TORCH_INDEX=
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -c /tmp/constraints.txt torch
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir -c /tmp/constraints.txt "$(echo /wheels/*.whl)[hf]" && rm -rf /wheels

# Compiled kernels and downloaded models outlive the container where these are volumes.
ENV XDG_CACHE_HOME=/cache HF_HOME=/models TRITON_CACHE_DIR=/cache/triton
RUN useradd --create-home --uid 10001 headrace && mkdir /cache /models && chown headrace /cache /models
USER headrace
WORKDIR /home/headrace
EXPOSE 8000
STOPSIGNAL SIGTERM
# Not while it loads (503 then); afterwards three failures in a row say that the engine makes no progress.
HEALTHCHECK --interval=10s --timeout=3s --start-period=600s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
# It listens beyond loopback, so it does not start without HEADRACE_API_KEY. A model and flags follow the image's name.
ENTRYPOINT ["headrace", "serve", "--host", "0.0.0.0", "--port", "8000"]
