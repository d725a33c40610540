#!/bin/bash
# 8 GPUs: 1 host(s) with 8 each. Written by
#   lightnet launch pile_379m --emit torchrun
# Start it where data and runs are: bash pile_379m.torchrun.sh
set -euo pipefail
. .venv/bin/activate
exec torchrun --standalone --nproc-per-node=8 \
    -m lightnet_llm.training.main \
    --config pile_379m \
    train.resume=auto
