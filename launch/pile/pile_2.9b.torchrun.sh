#!/bin/bash
# 48 GPUs: 6 host(s) with 8 each. Written by
#   lightnet launch pile_2.9b --emit torchrun
# Start it on every host, where data and runs are (a file system that all share): bash pile_2.9b.torchrun.sh HOST_NUMBER FIRST_HOST
# HOST_NUMBER counts from 0 to 5, FIRST_HOST is the name or address of number 0; MASTER_PORT must
# be free there and the same for all (default 29500).
set -euo pipefail
rank=${1:?"usage: bash pile_2.9b.torchrun.sh HOST_NUMBER FIRST_HOST"}
master=${2:?"usage: bash pile_2.9b.torchrun.sh HOST_NUMBER FIRST_HOST"}
. .venv/bin/activate
exec torchrun --nnodes=6 --nproc-per-node=8 \
    --node-rank="$rank" --master-addr="$master" --master-port="${MASTER_PORT:-29500}" \
    -m lightnet_llm.training.main \
    --config pile_2.9b \
    train.resume=auto
