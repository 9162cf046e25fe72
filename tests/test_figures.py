import ast
import glob
import os
from pathlib import Path

import pytest
import torch

import run
import sample
import train
from experiments import figures
from objectives import OBJECTIVES


def test_a_row_of_each_kind_is_drawn_with_its_mask(tmp_path, refuses):
    masks = {name: [row.mask for row in figures.rows_of(name)] for name in ("clm", "hybrid", "bd3lm")}
    assert torch.equal(masks["clm"][0], torch.ones(figures.T, figures.T).tril().bool())
    assert [bool(mask.all()) for mask in masks["hybrid"]] == [True, False]
    assert masks["bd3lm"][0][0].nonzero().tolist() == [[0], [1], [2], [3]], "not the batch's mask, a block of 4"
    pytest.importorskip("matplotlib")
    figures.draw(figures.rows_of("span", 16), str(tmp_path / "rows.png"), 16)
    assert os.path.getsize(tmp_path / "rows.png") > 5000
    refuses("cannot be drawn", figures.main, ["--objectives", "clm", "--out", str(tmp_path / "nowhere" / "x.png")])


CURVES = """row,steps,seed,metric,value
clm,10,1,left_to_right,1.1 clm,100,1,left_to_right,1.0 mdlm,10,1,bound,3.0 mdlm,10,2,bound,4.0 clm,10,1,left_4,7
clm,100,1,left_4,1 clm,100,2,left_4,3 mtp,100,1,left_4,5 mdlm,100,1,left_4,8 mdlm,100,1,infill_4,2 electra,100,1,task,.5
bart,100,1,task,.7 bart,100,2,task,.9 bart,100,1,task_baseline,1 clm,100,1,task,1 electra,100,1,task_baseline,.1
"""


def test_panels_show_every_seed_over_the_steps_and_over_the_lengths_of_holes(tmp_path, refuses):
    (tmp_path / "curves.csv").write_text(CURVES.replace(" ", "\n"))
    headings = {"bart": "edit distance", "clm": "bits", "nsp": "", "electra": "share of typos"}
    bits, holes, tasks = figures.curve_panels(tmp_path / "curves.csv", headings)
    assert bits.xs == [10, 100] and bits.lines == {"clm": {10: [1.1], 100: [1.0]}, "mdlm": {10: [3.0, 4.0]}}
    assert holes.lines == {"clm": {4: [1.0, 3.0]}, "mtp": {4: [5.0]}, "mdlm": {4: [2.0]}}
    assert bits.dashed == {"mdlm"} and holes.dashed == {"clm", "mtp"}
    assert tasks.lines == {"bart": {"bart\n(lower is better)": [0.7, 0.9]}, "electra": {"electra": [0.5]}}
    refuses("after 1000 steps", figures.main, ["--curves", str(tmp_path / "curves.csv")])
    assert tasks.marks == {"bart\n(lower is better)": 1.0, "electra": 0.1}
    pytest.importorskip("matplotlib")
    path = str(tmp_path / "compare.png")
    assert figures.draw_panels([bits, holes, tasks], path) == path and os.path.getsize(path) > 5000


def is_text(node):  # a docstring, the help of an objective, or what is passed to a function that prints
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    is_help = isinstance(node, ast.keyword) and node.arg in ("help", "use_help")
    return is_docstring or is_help or getattr(getattr(node, "func", None), "id", "") in ("Flag", "fail", "print", "say")


@pytest.mark.parametrize("path", [run.__file__, train.__file__, sample.__file__,
                                  *glob.glob(os.path.join(os.path.dirname(figures.__file__), "*.py"))])
def test_no_objective_is_named_in_the_code(path):
    """Otherwise a program would work for this objective only, and not for one that a fork adds. Comments, docstrings
    and what is passed to Flag, fail and print may give examples."""
    prose = set()
    for node in ast.walk(ast.parse(Path(path).read_text("utf-8"))):                 # a node comes before its parts
        if is_text(node):
            prose.update(ast.walk(node))
        elif isinstance(node, ast.Constant) and node not in prose and isinstance(node.value, str):
            assert not {*node.value.split(",")} & {*OBJECTIVES} - {"prefix"}, (
                f'{path}, line {node.lineno}: "{node.value}" names an objective. Read a field of Objective, such as '
                "bpb or uses. If the word does not mean an objective, give the new objective another name")
