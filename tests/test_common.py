"""Checksums of code tell what can change a figure from what cannot. Also what small programs refuse."""
import dataclasses
import importlib
import os

import pytest

import experiments.compare  # noqa: F401  all modules that it uses are loaded
from experiments import assignment, bench, common, figures, race
from objectives import OBJECTIVES

CODE = '''"""A module."""
import os


def corrupt(x, g, hp, rate=.5):
    """Masks bytes."""
    if rate > 1:
        fail(f"--rate {rate}: is too large")
    return {f"{x:>{g}} {{": x[1:2, ...]}, [None, 0x10], lambda *a, b=1: -a  # why


OBJECTIVES["mine"] = Objective("mine", corrupt, help="bytes", flags={"rate": Flag(0.5, "a rate")})
'''


NAMES = ["clm", "mlm", "span", "ul2", "xlnet"]


def checksum(source):
    return common.combine(common.read_statements(source))


@pytest.mark.parametrize("old, new, counts", [
    ("A module.", "Another.", False), ("Masks", "Hides", False), ("  # why", "", False), ("too large", "large", False),
    ('"bytes"', '"all bytes"', False), ("a rate", "the rate", False), ("import os\n", "", False), ("0x10", "16", False),
    ("{g}} {{", "{g}}", True), ("16", "17", True), ("rate > 1", "rate > 2", True), ("b=1", "b=2", True),
    ('"mine", c', '"my", c', True), ("[None, ", "[", True), ("1:2", "1:3", True)])
def test_only_code_counts(old, new, counts):
    source = CODE.replace("0x10", "16") if old == "16" else CODE
    assert old in source
    assert (checksum(source.replace(old, new)) != checksum(source)) == counts


def test_a_checksum_does_not_depend_on_the_version_of_python():
    assert checksum(CODE) == 2712518087, "recorded with 3.10, 3.11, 3.12 and 3.13"


def test_of_objectives_only_what_a_run_uses_counts():
    code = common.read_code()
    assert {"data.py", "model.py", "objectives.py", "run.py", "train.py"} <= code.keys()

    def changed_by(old, new, file="objectives.py"):  # -> names of objectives whose runs are older, is measuring, too?
        source = (common.ROOT / file).read_text("utf-8")
        assert old in source
        edited = code | {file: common.read_statements(source.replace(old, new))}
        names = [name for name in NAMES
                 if common.training_checksums(code, [name]) != common.training_checksums(edited, [name])]
        return names, common.measuring_checksum(code) != common.measuring_checksum(edited)
    assert changed_by("round(hp.mask_rate * T)", "int(hp.mask_rate * T)") == (["mlm"], False)
    assert changed_by("SPAN_ENDS = ", "SPAN_ENDS = 2 * ") == (["span", "ul2"], False)
    assert changed_by('OBJECTIVES["rotation"]', 'OBJECTIVES["mine"]') == ([], False)
    assert changed_by("first = len(fill.left_ids)", "first = 1 + len(fill.left_ids)") == ([], True), "only measures"
    assert changed_by("MOMENTUM = 0.9 ", "MOMENTUM = 0.8 ", "train.py") == (NAMES, False)
    assert changed_by("PROMPT = 32", "PROMPT = 16", "experiments/evaluate.py") == ([], True)


def test_the_file_that_defines_an_objective_counts_wherever_it_is(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def corrupt(x, g, hp):\n    return {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("mine")
    monkeypatch.setitem(OBJECTIVES, "mine", dataclasses.replace(OBJECTIVES["clm"], corrupt=mine.corrupt))
    assert os.path.relpath(mine.__file__, common.ROOT) in common.training_checksums(common.read_code(), ["mine"])


@pytest.mark.parametrize("program, flags, hint", [
    (bench, "--parts fly", "train,decode"), (bench, "--nanogpt nowhere", "model.py"),
    (figures, "--objectives clm,clmm", "unknown name"), (figures, "--objectives clm,mlm --labels GPT", "a label for"),
    (race, "--nanogpt .", "not prepared"),
    (assignment, "--functions mln", "Try mlm"), (assignment, "--functions mlm,Objective", "--functions Objective: "),
    (assignment, "--grade text.txt", "is not an assignment"), (assignment, "--functions mlm", "--out_dir .: exists"),
    (assignment, "--functions mlm --out_dir text.txt", "exists")])
def test_bad_flags_are_refused(program, flags, hint, text, refuses):
    refuses(hint, program.main, flags.split())
