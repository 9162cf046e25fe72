"""Make an assignment: a copy of this repository in which the bodies of some functions are missing. The tests grade it.

    python -m experiments.assignment --functions mlm,prefix_lm,fim,mdlm --out_dir ../assignment
    python -m experiments.assignment --functions verify,newton_schulz --tests tests --out_dir ../assignment

The functions may be any at the top level of the six files. Each keeps its signature and docstring. The tests run in the
copy, where those that fail are listed in graded.txt, and these here, where they must pass: in all a minute or more.
"""
import ast
import difflib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from data import Flag, fail
from experiments.flags import parse_own_flags
from run import run_program

FLAGS = {"functions": Flag("", "names of the functions to write, separated by commas"),
         "out_dir": Flag("", "folder of the assignment, which must not exist"),
         "tests": Flag([], "files of tests to choose from; by default those of the files that hold the functions")}
ROOT = Path(__file__).parents[1]
FILES = "data.py", "model.py", "objectives.py", "run.py", "train.py", "sample.py"
COPIED = {*FILES, "README.md", "LICENSE", "requirements.txt", "pyproject.toml", "docs", "experiments", "tests"}
# the last two would fail in a solved assignment: pages quote functions to the letter, and a copy has bodies missing
NOT_COPIED = {"__pycache__", "test_pages.py", "test_assignment.py"}


def not_copied(folder, names):  # for copytree
    return set(names) - COPIED if Path(folder) == ROOT else set(names) & NOT_COPIED


def blank(path, node):  # replaces what follows the docstring of a function, or its signature if it has no docstring
    lines = path.read_text("utf-8").split("\n")
    start = node.body[0].end_lineno if ast.get_docstring(node) else node.lineno
    lines[start:node.end_lineno] = [f'    raise NotImplementedError("{node.name} is not written yet")']
    path.write_text("\n".join(lines), "utf-8")


def run_tests(folder, tests):  # -> exit code of pytest: 0 if all pass, 1 if some fail, 2 if they cannot be imported
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-rN", "--tb=no", *tests], cwd=folder).returncode


def main(argv=None):  # -> exit code
    flags = parse_own_flags("python -m experiments.assignment", __doc__, FLAGS, argv)
    names = set(flags.functions.replace(" ", "").split(","))
    functions = {node.name: (node, file) for file in FILES for node in ast.parse((ROOT / file).read_text("utf-8")).body
                 if isinstance(node, ast.FunctionDef)}
    for name in names - functions.keys():
        [closest] = difflib.get_close_matches(name, functions, 1, 0)
        fail(f"--functions {name}: is not at the top level of {', '.join(FILES)}. Try {closest}")
    out = Path(flags.out_dir)
    if out.exists() or ROOT in out.resolve().parents:           # without --out_dir, it is the current folder
        fail(f"--out_dir {out}: exists already, or is in the repository. Try --out_dir ../assignment")
    shutil.copytree(ROOT, out, ignore=not_copied)
    for node, file in sorted((functions[name] for name in names), key=lambda found: -found[0].lineno):
        print(f"{file}, line {node.lineno}: {node.name} is blank", flush=True)
        blank(out / file, node)                 # from the bottom up, so that line numbers stay right
    if run_tests(out, flags.tests or {f"tests/test_{functions[name][1]}" for name in names}) != 1:
        shutil.rmtree(out)
        fail(f"--functions {flags.functions}: without them all tests pass, or none can run. Try other functions")
    graded = json.loads((out / ".pytest_cache/v/cache/lastfailed").read_text("utf-8"))
    (out / "graded.txt").write_text("\n".join(graded), "utf-8")
    start = time.perf_counter()
    print("the same tests with the bodies:", flush=True)
    code = run_tests(ROOT, [f"@{out.resolve() / 'graded.txt'}"])
    print(f"{len(graded)} tests fail in {out}. With the bodies, {'some fail' if code else 'none fails'} "
          f"({time.perf_counter() - start:.0f} s). To grade:\n    python -m pytest -q @graded.txt")
    return code


if __name__ == "__main__":
    run_program(main)
