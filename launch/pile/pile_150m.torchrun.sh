#!/bin/bash
# 8 GPUs: 1 host(s) with 8 each. Written by
#   lightnet launch pile_150m --emit torchrun
# Start it where data and runs are: bash pile_150m.torchrun.sh
set -euo pipefail
. .venv/bin/activate
exec torchrun --standalone --nproc-per-node=8 \
    -m lightnet_llm.training.main \
    --config pile_150m \
    train.resume=auto
