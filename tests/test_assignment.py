"""An assignment lacks the bodies of functions, and nothing else; its tests fail until they are back."""
import ast
import shutil
from pathlib import Path

import pytest

from experiments import assignment

TEST = "tests/test_train.py::test_newton_schulz_changes_only_singular_values"


def functions(file):  # a file of the repository -> {name: node} of its functions
    return {node.name: node for node in ast.parse(Path(file).read_text("utf-8")).body
            if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("file", assignment.FILES)
def test_every_function_can_be_blanked(file, tmp_path):
    path = shutil.copy(assignment.ROOT / file, tmp_path)
    whole = functions(path)
    for node in sorted(whole.values(), key=lambda node: -node.lineno):
        assignment.blank(Path(path), node)
    for name, node in functions(path).items():
        assert ast.dump(node.args) == ast.dump(whole[name].args)
        assert ast.get_docstring(node) == ast.get_docstring(whole[name])
        assert [type(line) for line in node.body] in ([ast.Expr, ast.Raise], [ast.Raise])


SUBMISSIONS = {  # what replaces the body of newton_schulz: what is printed of it
    "right": (None, "right"),
    "wrong": ("    return X", "not right"),
    "endless": ("    while True:\n        pass", "stopped after 40 seconds"),
    "leaves": ("    return X\n\n\nimport os\nos._exit(0)", "no result"),
    "patches": ("    return X\n\nfrom _pytest.python import Function\nFunction.runtest = lambda self: None", "refused")}


@pytest.mark.slow
def test_an_assignment_fails_until_it_is_solved_and_grades_submissions(tmp_path, capsys):
    out = tmp_path / "assignment"
    assert assignment.main(["--functions", "newton_schulz", "--tests", TEST, "--out_dir", str(out)]) == 0
    source = (assignment.ROOT / "train.py").read_text("utf-8")
    copy = (out / "train.py").read_text("utf-8")
    body = ast.get_source_segment(source, functions(assignment.ROOT / "train.py")["newton_schulz"])
    blank = ast.get_source_segment(copy, functions(out / "train.py")["newton_schulz"])
    assert copy == source.replace(body, blank) != source
    graded = (out / "graded.txt").read_text("utf-8").splitlines()
    assert graded and all(test.startswith(TEST) for test in graded)
    assert "`newton_schulz` in train.py" in (out / "HANDOUT.md").read_text("utf-8")
    paths = []
    for name, (code, _) in SUBMISSIONS.items():
        (tmp_path / name).mkdir()
        paths.append(tmp_path / name / "train.py")
        missing = '    raise NotImplementedError("newton_schulz is not written yet")'
        assert missing in copy
        paths[-1].write_text(source if code is None else copy.replace(missing, code), "utf-8")
    paths[0] = paths[0].parent                  # a folder, too
    capsys.readouterr()
    assert assignment.main(["--out_dir", str(out), "--limit", "40", "--grade", *map(str, paths)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, (_, verdict) in zip(lines, SUBMISSIONS.values(), strict=False):
        assert f"tests passed, {verdict}" in line, line
    assert len((out / "grades.csv").read_text("utf-8").splitlines()) == 1 + len(SUBMISSIONS)


def test_a_function_whose_code_a_page_shows_is_refused(tmp_path, refuses, monkeypatch):
    for file in assignment.FILES:
        shutil.copy(assignment.ROOT / file, tmp_path)
    (tmp_path / "README.md").write_text("def mlm(x, g, hp):\n", "utf-8")
    monkeypatch.setattr(assignment, "ROOT", tmp_path)
    refuses("README.md shows its code", assignment.main, ["--functions", "mlm", "--out_dir", str(tmp_path / "new")])


@pytest.mark.parametrize("outcomes", [{}, {"a": set()}])
def test_functions_that_tests_cannot_grade_are_refused(outcomes, text, refuses, monkeypatch):
    monkeypatch.setattr(assignment, "run_tests", lambda *args: outcomes)
    refuses("--functions weighted_loss: ", assignment.main, ["--functions", "weighted_loss", "--out_dir", "new"])
    assert not Path("new").exists()
