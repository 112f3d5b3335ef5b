"""Runs a notebook's cells in order, in this process, as Jupyter would: each last expression is shown.

python -m tests.notebooks docs/notebook.ipynb             # in any folder: what is written is below the current one
python -m tests.notebooks docs/notebook.ipynb --write     # keeps the outputs in the file
"""

import ast
import contextlib
import io
import json
import sys
import time
from pathlib import Path
from typing import Any


def run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of a cell, in nbformat's words: what it prints, then its last expression's texts."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, outputs = io.StringIO(), list[dict[str, Any]]()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    if printed.getvalue():
        text = printed.getvalue().splitlines(True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(True)
        outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
    return outputs


def run(notebook: dict[str, Any]) -> None:
    """Puts the outputs of all code cells into the notebook, and the seconds that each took on stderr."""
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            start = time.perf_counter()
            cell["outputs"] = run_cell("".join(cell["source"]), names)
            sys.stderr.write(f"{time.perf_counter() - start:.1f} s: {cell['source'][0]}")


if __name__ == "__main__":
    notebook = json.loads(Path(sys.argv[1]).read_text())
    run(notebook)
    sys.stdout.write(json.dumps(notebook, ensure_ascii=False))
