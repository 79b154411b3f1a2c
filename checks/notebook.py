"""Runs docs/first-hour.ipynb as a reader would, and says how long it took. Needs nbclient and
ipykernel (`pip install nbclient ipykernel`).

    python checks/notebook.py
"""

import pathlib
import time

import nbclient
import nbformat

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"


def main():
    notebook, start = nbformat.read(DOCS / "first-hour.ipynb", 4), time.monotonic()
    client = nbclient.NotebookClient(notebook, resources={"metadata": {"path": DOCS}})
    client.execute()  # raises the first cell's error
    figures = sum("image/png" in output.get("data", {}) for cell in notebook.cells
                  for output in cell.get("outputs", ()))
    print(f"{len(notebook.cells)} cells, {figures} figures, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
