"""Where a figure comes from: the weights that were measured, and checksums of the code that trained and measured them.

A checksum is that of the code itself. Comments, docstrings, help texts and messages do not count.
"""
import ast
import itertools
import json
import os
import sys
import zlib
from collections import namedtuple
from pathlib import Path

from run import checkpoint_path, load_run
import sample

ROOT = Path(__file__).resolve().parents[1]
# the code that only measures; all other modules at the top level train
MEASURING = {"sample.py", "experiments/bench.py", "experiments/evaluate.py", "experiments/score.py"}
TEXT_CALLS = {"fail", "print", "say", "Flag", "Metric"}         # their arguments change nothing that is computed
TEXT_KEYWORDS = {"help", "use_help"}            # settings, with their defaults, are compared by themselves


def load_latest(path, device="auto", dtype="auto"):  # -> what load_run returns, of ckpt.pt if path is a folder
    """The programs that measure read the latest weights, as compare does. sample.py reads best.pt."""
    model, hp, ckpt = load_run(checkpoint_path(path), device, dtype)
    sample.note(f"{ckpt['path']}: {hp.objective}, step {ckpt['step']} of {hp.max_iters}")
    return model, hp, ckpt


def read_json(path):  # -> its contents; {} if there is no such file
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def write_json(path, contents):  # a kill leaves no half file
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        json.dump(contents, f)
    os.replace(path + ".tmp", path)


# ---- checksums of code. A file is a list of its statements at the top level
# defines, uses: names, such as norm or OBJECTIVES['clm']; checksum: of the statement
Statement = namedtuple("Statement", "defines uses checksum")


def read_code():  # -> {file: [Statement]} of the modules at the top level that this process uses, and of MEASURING
    """To be called at the start: a long comparison runs the code that was imported then, whatever is edited later."""
    paths = [Path(getattr(module, "__file__", None) or "") for module in [*sys.modules.values()]]
    files = MEASURING | {path.name for path in paths if path.parent == ROOT}
    return {file: read_statements((ROOT / file).read_text("utf-8")) for file in sorted(files)}


def read_statements(source):  # text of a program -> [Statement], without imports
    statements = []
    for node in ast.parse(source).body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)) and not is_text(node):
            targets = [getattr(node, "name", None), *map(name_of, getattr(node, "targets", []))]
            uses = {name_of(child) for child in ast.walk(node)}
            statements.append(Statement({*targets} - {None}, uses - {None}, zlib.crc32(str(to_lists(node)).encode())))
    return statements


def name_of(node):  # norm -> "norm", OBJECTIVES["clm"] -> "OBJECTIVES['clm']", others -> None
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return f"{name_of(node.value)}[{node.slice.value!r}]"
    return node.id if isinstance(node, ast.Name) else None


def is_text(node):  # a docstring, or the help of an objective
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or isinstance(node, ast.keyword) and node.arg in TEXT_KEYWORDS


def to_lists(node):  # part of a syntax tree -> nested lists, in which only what is computed counts
    """Equal in Python 3.10 to 3.13, unlike ast.dump: the fields that newer versions have added are empty here."""
    if isinstance(node, list):
        return [to_lists(child) for child in node if not is_text(child)]
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in TEXT_CALLS:
        return node.func.id
    if isinstance(node, ast.JoinedStr):         # Python 3.12 adds an empty string to {x:{n}}
        return ["JoinedStr", *(to_lists(part) for part in node.values if getattr(part, "value", "x") != "")]
    fields = [[name, to_lists(value)] for name, value in ast.iter_fields(node) if value is not None and value != []]
    return [type(node).__name__, *fields]


def used_statements(statements, names):  # -> those that the names depend on, in their order
    """Also those that define no name, such as loops."""
    used = []
    while True:
        more = [s for s in statements if s not in used and (s.defines & names or not s.defines)]
        if not more:
            return [s for s in statements if s in used]
        used += more
        names = names.union(*(s.uses for s in more))


def names_in(files):  # [[Statement]] -> {name}
    return set().union(*(s.uses for statements in files for s in statements))


def combine(statements):  # -> int
    return zlib.crc32(str([s.checksum for s in statements]).encode())


def training_checksums(code, objectives):  # of read_code, names -> {file: checksum}
    """Of objectives.py, only the definitions that these objectives use count: when one is added or edited, runs of the
    others stay valid."""
    files = {file: statements for file, statements in code.items() if file not in MEASURING}
    others = [statements for file, statements in files.items() if file != "objectives.py"]
    names = names_in(others) | {f"OBJECTIVES[{name!r}]" for name in objectives}
    files["objectives.py"] = used_statements(code["objectives.py"], names)
    return {file: combine(statements) for file, statements in files.items()}


def measuring_checksum(code):  # of read_code -> int
    files = [code[file] for file in sorted(MEASURING)]
    used = used_statements(code["objectives.py"], names_in(files))
    return combine([*used, *itertools.chain(*files)])
