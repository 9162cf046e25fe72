import ast
import glob
import os
from pathlib import Path

import pytest
import torch

import run
import sample
import train
from data import CLS, MODE_R, MODE_S, MODE_X, PRE
from experiments import figures
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
    refuses("cannot be drawn", figures.main, ["--objectives", "clm", "--out", str(tmp_path / "nowhere" / "x.png")])


CURVES = """row,steps,seed,metric,value
clm,10,1,left_to_right,1.1
clm,100,1,left_to_right,1.0
mdlm,10,1,bound,3.0
mdlm,10,2,bound,4.0
clm,100,1,left_4,1
clm,100,2,left_4,3
mtp,100,1,left_4,5
mdlm,100,1,left_4,8
mdlm,100,1,infill_4,2
bart,100,1,task,.7
bart,100,2,task,.9
bart,100,1,task_baseline,1
electra,100,1,task,.5
electra,100,1,task_baseline,.1
clm,100,1,task,1
clm,10,1,left_4,7
"""


def test_panels_show_every_seed_over_the_steps_and_over_the_lengths_of_holes(tmp_path):
    (tmp_path / "curves.csv").write_text(CURVES)
    headings = {"bart": "edit distance", "clm": "bits", "nsp": "", "electra": "share of typos"}
    bits, holes, tasks = figures.curve_panels(tmp_path / "curves.csv", headings)
    assert bits.xs == [10, 100] and bits.lines == {"clm": {10: [1.1], 100: [1.0]}, "mdlm": {10: [3.0, 4.0]}}
    assert holes.lines == {"clm": {4: [1.0, 3.0]}, "mtp": {4: [5.0]}, "mdlm": {4: [2.0]}}
    assert bits.dashed == {"mdlm"} and holes.dashed == {"clm", "mtp"}
    assert tasks.lines == {"bart": {"bart\n(less is better)": [0.7, 0.9]}, "electra": {"electra": [0.5]}}
    assert tasks.marks == {"bart\n(less is better)": 1.0, "electra": 0.1}


@pytest.fixture
def saved(monkeypatch):  # -> list of the pictures that are drawn
    matplotlib = pytest.importorskip("matplotlib.figure")
    pictures = []
    monkeypatch.setattr(matplotlib.Figure, "savefig", lambda figure, path, **how: pictures.append(figure))
    return pictures


def test_curves_are_drawn(tmp_path, saved):
    (tmp_path / "curves.csv").write_text(CURVES)
    panels = figures.curve_panels(tmp_path / "curves.csv", {"bart": "edit distance"})
    assert figures.draw_panels(panels, "compare.png") == "compare.png"
    bits, hole, tasks = saved[0].axes
    assert [line.get_xydata().tolist() for line in bits.lines] == [[[0, 1.1], [1, 1.0]], [[0, 3.5]]]
    dots = [dots.get_offsets().tolist() for dots in bits.collections]
    assert dots[:2] == [[[0, 1.1], [1, 1.0]], [[0, 3.0], [0, 4.0]]], "not a dot for each seed"
    assert tasks.collections[-1].get_offsets().tolist() == [[0, 1.0]], "the baseline is not marked"
    assert [text.get_text() for text in saved[0].legends[0].get_texts()] == ["clm", "mtp", "bart", "mdlm"]
    assert [line.get_linestyle() for line in hole.lines] == ["--", "-", "--"]
    assert figures.draw_panels([], "x.png").startswith("no picture")


def test_an_objective_has_the_same_color_in_every_picture_and_other_rows_have_further_ones(saved):
    for rows in ["mdlm"], ["clm:1+mlm:1", "mlm", "mdlm"], [*OBJECTIVES, "clm:1+mlm:1"]:
        panel = figures.Panel("", "", "", [4], {row: {4: [1.0]} for row in rows}, set(), {})
        figures.draw_panels([panel], "x.png")
    [[mdlm], [mixture, _, again], all_colors] = [[line.get_color() for line in p.axes[0].lines] for p in saved]
    assert mdlm == again and mixture == all_colors[-1] and len(set(all_colors)) == len(OBJECTIVES) + 1


@pytest.mark.parametrize("flags, hint", [
    ("--objectives clm,clmm", "unknown name"), ("--objectives clm,mlm --labels GPT", "a label for"),
    ("--curves nowhere.csv", "compare's .csv")])
def test_bad_flags_are_refused(flags, hint, refuses):
    refuses(hint, figures.main, flags.split())


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
