import ast
import glob
import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import run
import sample
import train
from data import CLS, MODE_R, MODE_S, MODE_X, PRE
from experiments import figures
from experiments.common import TEXT_CALLS, is_text
from objectives import IGNORE_INDEX, OBJECTIVES


def test_one_row_of_each_kind_is_drawn_and_the_legend_explains_every_id():
    rows = {name: figures.rows_of(name) for name in OBJECTIVES}
    first = {name: [row.lines[0][1][0] for row in some] for name, some in rows.items()}
    assert first["fim"][0] == PRE and len(first["fim"]) == 2, "not first a rearranged row, then a plain one"
    assert set(first["ul2"]) == {MODE_R, MODE_S, MODE_X} and first["nsp"] == [CLS]
    assert [bool(row.mask.all()) for row in rows["hybrid"]] == [True, False]
    assert torch.equal(rows["clm"][0].mask, torch.ones(figures.T, figures.T).tril().bool())
    assert rows["bd3lm"][0].mask[0].nonzero().tolist() == [[0], [1], [2], [3]], "not the batch's mask, a block of 4"
    assert len(rows["mlm"]) == 1, "a row that starts with a MASK is not another kind"
    assert rows["rotation"][0].lines[-1][1] != ["0"], "the row is not rotated"
    legend = " ".join(figures.legend_texts([row for some in rows.values() for row in some]))
    for i in {i for some in rows.values() for row in some for _, ids, _ in row.lines for i in ids} - {IGNORE_INDEX}:
        text, color = figures.cell(i, figures.READ)
        assert text and (color != figures.SPECIAL or text in legend)


def test_the_picture_is_drawn(tmp_path, refuses):
    pytest.importorskip("matplotlib")
    rows = figures.rows_of("span", 16)
    assert len(rows[0].lines[0][1]) == len(rows[0].mask) == 16
    assert figures.legend_texts(rows, True)[0].startswith("∅ EOT   ‖ SEP   ① sentinels   "), "not the used ids"
    figures.draw(rows, str(tmp_path / "rows.png"), 16)
    assert os.path.getsize(tmp_path / "rows.png") > 5000
    refuses("cannot be written", figures.main, ["--objectives", "clm", "--out", str(tmp_path / "nowhere" / "x.png")])


def test_results_are_those_of_one_length_of_training(tmp_path):
    path = tmp_path / "curves.csv"
    path.write_text("clm,9,1,left_4,1\nclm,9,2,left_4,3\nmtp,9,1,left_4,5\nclm,8,1,left_4,7\n")
    for labels, name in ("", "clm"), ("GPT,BERT", "GPT"):
        rows = figures.read_runs(Namespace(curves=str(path), steps="9", labels=labels), ["clm", "mlm"])
        assert figures.holes_panel(rows, "a title").lines == {f"{name} (left side)": {4: [1.0, 3.0]}}


@pytest.mark.parametrize("path", [run.__file__, train.__file__, sample.__file__,
                                  *glob.glob(os.path.join(os.path.dirname(figures.__file__), "*.py"))])
def test_no_objective_is_named_in_the_code(path):
    """Otherwise a program would work for this objective only, and not for one that a fork adds. Comments, docstrings
    and what is passed to Flag, fail and print may give examples."""
    prose = set()
    for node in ast.walk(ast.parse(Path(path).read_text("utf-8"))):                 # a node comes before its parts
        if is_text(node) or isinstance(node, ast.Call) and getattr(node.func, "id", "") in TEXT_CALLS:
            prose.update(ast.walk(node))
        elif isinstance(node, ast.Constant) and node not in prose and isinstance(node.value, str):
            assert not {*node.value.split(",")} & {*OBJECTIVES} - {"prefix"}, (
                f'{path}, line {node.lineno}: "{node.value}" names an objective. Read a field of Objective, such as '
                "bpb or uses. If the word does not mean an objective, give the new objective another name")
