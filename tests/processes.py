"""Run by torchrun: the algorithms' commands in a JSON file, one after the other, in the same
processes.

    torchrun --nproc-per-node 2 tests/processes.py COMMANDS.json     ([["fedavg", "--rounds", "2"]])
"""

import importlib
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

for name, *argv in json.loads(pathlib.Path(sys.argv[1]).read_text()):
    importlib.import_module(name).main(argv)
