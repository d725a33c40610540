"""The script the deepspeed launcher starts: ``deepspeed launch/train.py --config CONFIG [key=value ...]``."""

from lightnet_llm.training.main import process

process()
