"""``python -m lightnet_llm.cli``: the command where its script is not on the path, as under launchers."""

from . import main

if __name__ == "__main__":
    main(prog_name="lightnet")
