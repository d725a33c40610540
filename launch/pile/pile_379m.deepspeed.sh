#!/bin/bash
# 8 GPUs: 1 host(s) with 8 each. Written by
#   lightnet launch pile_379m --emit deepspeed
# Start it where data and runs are: bash pile_379m.deepspeed.sh
set -euo pipefail
. .venv/bin/activate
exec lightnet train pile_379m \
    train.resume=auto \
    --gpus 8
