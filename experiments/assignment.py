"""Make an assignment: a copy of this repository in which the bodies of some functions are missing. The tests grade it.

    python -m experiments.assignment --functions mlm,prefix_lm,fim,mdlm --out_dir ../assignment
    python -m experiments.assignment --functions verify,newton_schulz --tests tests --out_dir ../assignment
    python -m experiments.assignment --out_dir ../assignment --grade ../ada ../bob/objectives.py

The functions may be any at the top level of the six files. Each keeps its signature and docstring. The tests run in the
copy, where those that fail are listed in graded.txt, and these here, where they must pass. HANDOUT.md is for students.

A submission is a file, or a folder of the files in which functions are missing. The graded tests run in a fresh copy of
this repository with these files. It is right if each test passes that passes here, and one that must fail does fail, so
it may not replace pytest or end it early. But submitted code runs with your rights: use a container or another account.
"""
import ast
import csv
import difflib
import shutil
import subprocess
import sys
import tempfile
import uuid
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from data import Flag, fail
from experiments.common import ROOT, parse_own_flags
from run import run_program

FLAGS = {"functions": Flag("", "names of the functions to write, separated by commas"),
         "out_dir": Flag("", "folder of the assignment, which must not exist, except with --grade"),
         "tests": Flag([], "files of tests to choose from; by default those of the files that hold the functions"),
         "grade": Flag([], "submissions: files, or folders with the files in which functions are missing"),
         "limit": Flag(900, "with --grade: seconds for each submission", 1)}
FILES = "data.py", "model.py", "objectives.py", "run.py", "train.py", "sample.py"
COPIED = {*FILES, "README.md", "LICENSE", "requirements.txt", "pyproject.toml", "docs", "experiments", "tests"}
# the last two would fail in a solved assignment: pages quote functions to the letter, and a copy has bodies missing
NOT_COPIED = {"__pycache__", "test_pages.py", "test_assignment.py"}
MISSING = "is not written yet"
HANDOUT = f"""# Assignment
Write the functions that raise "{MISSING}". The docstring of each says what it must do, mostly with an example:
%s

Test your solution with pytest 8.2 or newer (-k NAME selects the tests of one objective):

    python -m pytest -q @graded.txt
"""


def not_copied(folder, names):  # for copytree
    return set(names) - COPIED if Path(folder) == ROOT else set(names) & NOT_COPIED


def blank(path, node):  # replaces what follows the docstring of a function, or its signature if it has no docstring
    lines = path.read_text("utf-8").split("\n")
    start = node.body[0].end_lineno if ast.get_docstring(node) else node.lineno
    lines[start:node.end_lineno] = [f'    raise NotImplementedError("{node.name} {MISSING}")']
    path.write_text("\n".join(lines), "utf-8")


def run_tests(folder, tests, limit=None):  # -> {test: outcomes other than passed, such as {"failure"}}
    """Raises subprocess.TimeoutExpired after `limit` seconds. Leaves out files that cannot be imported."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *tests]
        subprocess.run(command, cwd=folder, timeout=limit, capture_output=True)
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else []
        return {f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}": {child.tag for child in case}
                for case in cases if case.get("classname")}


def make(flags):  # makes the assignment in --out_dir -> exit code
    names = set(flags.functions.replace(" ", "").split(","))
    functions = {node.name: (node, file) for file in FILES for node in ast.parse((ROOT / file).read_text("utf-8")).body
                 if isinstance(node, ast.FunctionDef)}
    for name in names - functions.keys():
        [closest] = difflib.get_close_matches(name, functions, 1, 0)
        fail(f"--functions {name}: is not at the top level of {', '.join(FILES)}. Try {closest}")
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        for name in names:
            if f"def {name}(" in page.read_text("utf-8"):
                fail(f"--functions {name}: {page.name} shows its code. Try other functions")
    out = Path(flags.out_dir)
    if out.exists() or ROOT in out.resolve().parents:           # without --out_dir, it is the current folder
        fail(f"--out_dir {out}: exists already, or is in the repository. Try --out_dir ../assignment")
    shutil.copytree(ROOT, out, ignore=not_copied)
    found = sorted((functions[name] for name in names), key=lambda found: -found[0].lineno)
    for node, file in found:                    # from the bottom up, so that line numbers stay right
        blank(out / file, node)
    text = "\n".join(f"- `{node.name}` in {file}" for node, file in reversed(found))
    (out / "HANDOUT.md").write_text(HANDOUT % text, "utf-8")
    outcomes = run_tests(out, flags.tests or sorted({f"tests/test_{file}" for _, file in found}))
    failing = [test for test, outcome in outcomes.items() if outcome & {"failure", "error"}]
    if not failing:
        shutil.rmtree(out)
        fail(f"--functions {flags.functions}: without them all tests pass, or none can run. Try other functions")
    print(f"{text}\n{len(failing)} tests fail in {out}. The same tests with the bodies:", flush=True)
    graded = [test for test, outcome in run_tests(ROOT, failing).items() if not outcome]
    (out / "graded.txt").write_text("\n".join(graded), "utf-8")
    print(f"{len(graded)} pass. To grade:\n    python -m experiments.assignment --out_dir {out} --grade SUBMISSION...")
    return 0


def grade(flags):  # prints a line for each submission, writes grades.csv -> exit code
    out = Path(flags.out_dir)
    if not (out / "graded.txt").exists():
        fail(f"--out_dir {out}: is not an assignment. Try the --out_dir with which it was made")
    graded = (out / "graded.txt").read_text("utf-8").split("\n")
    files = [file for file in FILES if MISSING in (out / file).read_text("utf-8")]
    submissions = {}                            # {path: its files}
    for path in map(Path, flags.grade):
        submissions[path] = [path] if path.name in files else [path / file for file in files]
        if not all(file.is_file() for file in submissions[path]):
            fail(f"--grade {path}: has no {', '.join(files)}. Try the folder or the file of a submission")
    expected = {test for test, outcome in run_tests(ROOT, graded).items() if not outcome}
    with open(out / "grades.csv", "w", encoding="utf-8", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["submission", "passed", "of", "verdict"])
        for path, its_files in submissions.items():
            passed, verdict = grade_one(its_files, graded, expected, flags.limit)
            writer.writerow([path, passed, len(expected), verdict])
            print(f"{path}: {passed} of {len(expected)} tests passed, {verdict}", flush=True)
    return 0


def grade_one(files, graded, expected, limit):  # -> number of passed tests, verdict
    must_fail = f"test_{uuid.uuid4().hex}"      # a name that no submission knows
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "copy"
        shutil.copytree(ROOT, copy, ignore=not_copied)
        for file in files:
            shutil.copyfile(file, copy / file.name)
        (copy / "tests" / f"{must_fail}.py").write_text(f"def {must_fail}():\n    assert False\n", "utf-8")
        try:
            outcomes = run_tests(copy, [*graded, f"tests/{must_fail}.py"], limit)
        except subprocess.TimeoutExpired:
            return 0, f"stopped after {limit} seconds"
    if not outcomes:
        return 0, "no result: it cannot be imported, or it ended the tests"
    if not outcomes.get(f"tests/{must_fail}.py::{must_fail}"):
        return 0, "refused: a test that must fail did not"
    passed = len({test for test, outcome in outcomes.items() if not outcome} & expected)
    return passed, "right" if passed == len(expected) else "not right"


def main(argv=None):  # -> exit code
    flags = parse_own_flags("python -m experiments.assignment", __doc__, FLAGS, argv)
    return grade(flags) if flags.grade else make(flags)


if __name__ == "__main__":
    run_program(main)
