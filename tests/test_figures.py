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


def test_one_row_of_each_kind_is_drawn_the_most_telling_first_and_every_id_is_explained():
    rows = {name: figures.rows_of(name) for name in OBJECTIVES}
    first = {name: [row.lines[0][1][0] for row in some] for name, some in rows.items()}
    assert first["fim"][0] == PRE and len(first["fim"]) == 2, "a rearranged row, then a plain one"
    assert set(first["ul2"]) == {MODE_R, MODE_S, MODE_X} and first["nsp"] == [CLS]
    assert [bool(row.mask.all()) for row in rows["hybrid"]] == [True, False]
    assert torch.equal(rows["clm"][0].mask, torch.ones(figures.T, figures.T).tril().bool())
    assert rows["bd3lm"][0].mask[0].nonzero().tolist() == [[0], [1], [2], [3]], "the batch's own mask: a block of 4"
    assert len(rows["mlm"]) == 1, "a MASK at the start is no kind of row"
    assert rows["rotation"][0].lines[-1][1] != ["0"], "it is rotated"
    legend = " ".join(figures.legend_texts([row for some in rows.values() for row in some]))
    for i in {i for some in rows.values() for row in some for _, ids, _ in row.lines for i in ids} - {IGNORE_INDEX}:
        text, color = figures.cell(i, figures.READ)
        assert text and (color != figures.SPECIAL or text in "②③④" or f"{text} " in legend)


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    figures.draw(figures.rows_of("fim"), str(tmp_path / "rows.png"))
    assert os.path.getsize(tmp_path / "rows.png") > 5000


@pytest.mark.parametrize("path", [run.__file__, train.__file__, sample.__file__,
                                  *glob.glob(os.path.join(os.path.dirname(figures.__file__), "*.py"))])
def test_no_objective_is_named_in_the_code(path):
    """What a program needs to know of an objective stands in its struct. Texts for the user may name examples."""
    nodes = [*ast.walk(ast.parse(Path(path).read_text("utf-8")))]
    texts = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    texts += [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Flag", "fail")]
    allowed = {id(each) for node in texts for each in ast.walk(node) if isinstance(each, ast.Constant)}
    code = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in allowed]
    words = {word for text in code for word in str(text).replace(",", " ").split()}
    assert set(OBJECTIVES) & words <= {"prefix", "span"}
