"""lm-eval's own program with the model ``lightnet``: ``python -m lightnet_eval --model lightnet --model_args ...``."""

from lm_eval.__main__ import cli_evaluate

from .plugin import register

if __name__ == "__main__":
    register(always=True)
    cli_evaluate()
