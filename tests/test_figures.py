import ast
import dataclasses
import os
from unittest import mock

import pytest
import torch

from data import CLS, EOT, MASK, MODE_R, MODE_S, MODE_X, PAD, PRE, SENTINEL
from experiments import bench, compare, evaluate, figures
from objectives import IGNORE_INDEX, OBJECTIVES


def all_rows():
    return [row for name in OBJECTIVES for row in figures.rows_of(name)]


def first_ids(name):  # -> the first id of each row that is drawn
    return [row.lines[0].ids[0] for row in figures.rows_of(name)]


def test_one_row_of_each_kind_is_drawn_the_most_telling_first():
    assert first_ids("fim")[0] == PRE and len(first_ids("fim")) == 2, "a rearranged row, then a plain one"
    assert set(first_ids("ul2")) == {MODE_R, MODE_S, MODE_X}
    assert first_ids("nsp") == [CLS]
    assert [row.prefix for row in figures.rows_of("hybrid")] == [figures.T, 0]
    assert len(figures.rows_of("mlm")) == len(figures.rows_of("mdlm")) == 1, "a MASK at the start is no kind of row"
    [rotation] = figures.rows_of("rotation")
    assert rotation.lines[-1].ids != [0], "it is rotated"


def test_every_cell_has_a_sign_that_the_legend_explains():
    rows = all_rows()
    legend = " ".join(figures.legend_texts(rows))
    for row in rows:
        for line in row.lines:
            for i in line.ids:
                text, color = figures.cell(line, i)
                assert color in figures.COLORS
                if line.is_number or i == IGNORE_INDEX:
                    continue
                assert text, "an empty box would say nothing"
                printable = len(text) == 1 and text.isascii() and i < 128
                assert printable or f"{figures.sign_in_legend(i)}: " in legend, text


@pytest.mark.parametrize("i, want", [
    (97, "a"), (32, "␣"), (10, "\\n"), (9, "x09"), (0x9f, "x9f"), (EOT, "EOT"), (PAD, "PAD"), (MASK, "MASK"),
    (SENTINEL + 7, "7")])
def test_signs(i, want):
    assert figures.sign(i) == want


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = str(tmp_path / "rows.png")
    figures.draw(figures.rows_of("fim"), path)
    assert os.path.getsize(path) > 5000


def test_a_mask_of_its_own_is_drawn_as_it_is(monkeypatch):
    own = torch.rand(figures.T, figures.T) < 0.5
    clm = OBJECTIVES["clm"]

    def corrupt(x, g, hp):
        return clm.corrupt(x, g, hp) | {"mask": own.expand(len(x), -1, -1)}
    monkeypatch.setitem(OBJECTIVES, "clm", dataclasses.replace(clm, corrupt=corrupt))
    drawn = []
    axis = mock.Mock(imshow=lambda mask, **how: drawn.append(mask))
    for row in [*figures.rows_of("clm"), *figures.rows_of("mtp")]:
        figures.draw_mask(axis, row)
    assert drawn == [own.tolist(), torch.ones(figures.T, figures.T).tril().bool().tolist()]


@pytest.mark.parametrize("path", ["nowhere/rows.png", "rows.xyz"])
def test_a_picture_that_cannot_be_written_is_one_line(path, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as e:
        figures.draw(figures.rows_of("fim"), path)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and path in err


@pytest.mark.parametrize("module", [bench, compare, evaluate, figures])
def test_no_objective_is_named_in_the_code(module):
    """What these need to know of an objective stands in its struct. Docstrings may show an example."""
    with open(module.__file__, encoding="utf-8") as f:
        tree = ast.parse(f.read())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    words = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            words += node.value.replace(",", " ").split()
    also_words_of_their_own = {"prefix", "span"}
    assert not (set(OBJECTIVES) - also_words_of_their_own) & set(words)
