# A GPU image with pinned versions: CUDA 13.0, Python 3.12, torch 2.11.0 (its wheels bring CUDA's libraries and triton 3.6).
# nvcc is there because DeepSpeed compiles some of its operators where they run.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update && apt-get install -y --no-install-recommends \
        python3.12 python3.12-venv python3.12-dev git make openssh-client pdsh ninja-build \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/lightnet
COPY . .
RUN python3.12 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir torch==2.11.0 megatron-core==0.19.2 -e '.[eval,vision]'

ENV PATH=/opt/lightnet/.venv/bin:$PATH \
    TORCH_NCCL_ASYNC_ERROR_HANDLING=1
CMD ["lightnet", "doctor"]
