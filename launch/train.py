"""The script the deepspeed launcher starts: ``deepspeed launch/train.py --config CONFIG [key=value ...]``."""

import sys

from lightnet_llm.training.main import main

sys.exit(main())
