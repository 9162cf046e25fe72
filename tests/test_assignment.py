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


@pytest.mark.slow
def test_an_assignment_fails_until_it_is_solved(tmp_path):
    out = tmp_path / "assignment"
    assert assignment.main(["--functions", "newton_schulz", "--tests", TEST, "--out_dir", str(out)]) == 0
    source = (assignment.ROOT / "train.py").read_text("utf-8")
    copy = (out / "train.py").read_text("utf-8")
    body = ast.get_source_segment(source, functions(assignment.ROOT / "train.py")["newton_schulz"])
    blank = ast.get_source_segment(copy, functions(out / "train.py")["newton_schulz"])
    assert copy == source.replace(body, blank) != source
    graded = (out / "graded.txt").read_text("utf-8").splitlines()
    assert graded and all(test.startswith(TEST) for test in graded)
    assert assignment.run_tests(out, ["@graded.txt"]) == 1
    (out / "train.py").write_text(source, "utf-8")
    assert assignment.run_tests(out, ["@graded.txt"]) == 0


@pytest.mark.parametrize("flags, hint", [
    (["--functions", "mln"], "Try mlm"), (["--functions", "mlm,Objective"], "--functions Objective: "),
    (["--functions", "mlm"], "--out_dir .: exists"), (["--functions", "mlm", "--out_dir", "text.txt"], "exists")])
def test_bad_flags_are_refused(flags, hint, text, refuses):
    refuses(hint, assignment.main, flags)


@pytest.mark.parametrize("code", [0, 2])
def test_functions_that_tests_cannot_grade_are_refused(code, text, refuses, monkeypatch):
    monkeypatch.setattr(assignment, "run_tests", lambda *args: code)
    refuses("--functions weighted_loss: ", assignment.main, ["--functions", "weighted_loss", "--out_dir", "new"])
    assert not Path("new").exists()
