#!/bin/bash
# 16 GPUs: 2 host(s) with 8 each. Written by
#   lightnet launch pile_1b --emit deepspeed
# HOSTFILE has 2 lines 'host slots=8'. Data, runs and this folder lie on a file
# system that all hosts share.
# Start it on one host, which reaches the others by ssh without a password: bash pile_1b.deepspeed.sh HOSTFILE
# or on every host by itself, without ssh: bash pile_1b.deepspeed.sh HOSTFILE HOST_NUMBER FIRST_HOST
# (MASTER_PORT must then be free on the first host and the same for all; default 29500).
set -euo pipefail
hostfile=${1:?"usage: bash pile_1b.deepspeed.sh HOSTFILE"}
. .venv/bin/activate
if [ $# -lt 2 ]; then
    exec lightnet train pile_1b \
        train.resume=auto \
        --hostfile "$hostfile"
fi
[ -r "$hostfile" ] || { echo "error: hostfile $hostfile cannot be read" >&2; exit 1; }
exec deepspeed --hostfile "$hostfile" --no_ssh --node_rank "$2" \
    --master_addr "${3:?"FIRST_HOST is missing"}" --master_port "${MASTER_PORT:-29500}" \
    --module lightnet_llm.training.main --config pile_1b \
    train.resume=auto
