"""Shared by the programs in experiments/: flags, the weights that are measured, and checksums of code."""
import ast
import json
import os
import sys
import zlib
from argparse import Namespace
from collections import namedtuple
from pathlib import Path

from data import fail
from objectives import OBJECTIVES
from run import checkpoint_path, load_run, make_parser, parse
import sample

ROOT = Path(__file__).resolve().parents[1]
# the files that only measure; all others at the top level train
MEASURING = "experiments/bench.py", "experiments/evaluate.py", "experiments/score.py", "sample.py"
TEXT_CALLS = "Flag", "Metric", "fail", "print", "say"           # what they are given changes no figure by itself


def parse_own_flags(prog, doc, flags, argv):  # for a program that reads only its own flags -> Namespace of them
    given = make_parser(prog, doc, {"flags": flags}).parse_args(argv)
    return Namespace(**{name: flag.default for name, flag in flags.items()} | vars(given))


def parse_with_train_flags(prog, doc, flags, reserved, argv):  # for a program that trains -> Namespace, list of words
    """Returns the program's own flags as a Namespace, and the other words of argv, which are flags of train.py. Fails
    on a flag that neither has, and on a reserved one: a flag of train.py that the program sets itself."""
    given, rest = make_parser(prog, doc, {"flags, in addition to train.py's": flags}).parse_known_args(argv)
    for name in sorted(reserved & set(parse(rest))):
        fail(f"--{name}: is set by this program itself. Try its own flags, {prog} --help")
    return Namespace(**{name: flag.default for name, flag in flags.items()} | vars(given)), rest


def to_words(given):  # {name: value} -> the words of a command line
    words = []
    for name, value in given.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            values = value if isinstance(value, list) else [value]
            words += [f"--{name}", *map(str, values)]
    return words


def load_latest(path, device="auto", dtype="auto"):  # -> what load_run returns, of ckpt.pt if path is a folder
    model, hp, ckpt = load_run(checkpoint_path(path), device, dtype)
    sample.note(f"{ckpt['path']}: {hp.objective}, step {ckpt['step']} of {hp.max_iters}")
    return model, hp, ckpt


def read_json(path):  # -> its contents, or {} if there is no such file
    return json.loads(Path(path).read_text("utf-8")) if os.path.exists(path) else {}


def write_json(path, contents):  # a kill leaves no half file
    Path(path + ".tmp").write_text(json.dumps(contents), "utf-8")
    os.replace(path + ".tmp", path)


# ---- checksums of code: comments, docstrings, help texts, messages and imports do not count
# a statement at the top level of a file; defines, uses: names, such as norm and OBJECTIVES['clm']
Statement = namedtuple("Statement", "defines uses checksum")


def read_code():  # -> {file: [Statement]} of MEASURING and of the modules that train in this process
    """Modules at the top level, and those in other folders that define an objective. To be called at the start:
    a comparison of many hours runs the code that was imported then."""
    defining = {objective.corrupt.__module__ for objective in OBJECTIVES.values()}
    paths = {name: Path(getattr(module, "__file__", None) or "") for name, module in [*sys.modules.items()]}
    used = [path for name, path in paths.items() if path.parent == ROOT or name in defining and path.is_file()]
    files = {*MEASURING, *(os.path.relpath(path, ROOT) for path in used)}
    return {file: read_statements((ROOT / file).read_text("utf-8")) for file in sorted(files)}


def read_statements(source):  # text of a program -> [Statement]
    statements = []
    for node in ast.parse(source).body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)) and not is_text(node):
            defines = {getattr(node, "name", None), *map(name_of, getattr(node, "targets", []))} - {None}
            uses = {name_of(child) for child in ast.walk(node)} - {None}
            statements.append(Statement(defines, uses, zlib.crc32(str(to_lists(node)).encode())))
    return statements


def name_of(node):  # norm -> "norm", OBJECTIVES["clm"] -> "OBJECTIVES['clm']", others -> None
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return f"{name_of(node.value)}[{node.slice.value!r}]"
    return node.id if isinstance(node, ast.Name) else None


def is_text(node):  # a docstring, or the help of an objective
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or isinstance(node, ast.keyword) and node.arg in ("help", "use_help")


def to_lists(node):  # of a syntax tree -> nested lists; equal in Python 3.10 to 3.13, unlike ast.dump
    if isinstance(node, list):
        return [to_lists(child) for child in node if not is_text(child)]
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in TEXT_CALLS:
        return node.func.id
    if isinstance(node, ast.JoinedStr):         # Python 3.12 adds an empty string to f"{x:{n}}"
        return ["JoinedStr", *(to_lists(part) for part in node.values if getattr(part, "value", "x") != "")]
    # fields that newer versions have added are empty
    fields = [[name, to_lists(value)] for name, value in ast.iter_fields(node) if value is not None and value != []]
    return [type(node).__name__, *fields]


def combine(statements):  # -> checksum of all, whatever their order
    return zlib.crc32(str(sorted(s.checksum for s in statements)).encode())


def used_by(names, statements):  # -> the statements that the names depend on, and those that define no name
    used = []
    while True:
        more = [s for s in statements if s not in used and (s.defines & names or not s.defines)]
        if not more:
            return used
        used += more
        names = names.union(*(s.uses for s in more))


def training_checksums(code, objectives):  # of read_code, names -> {file: checksum}
    """Of objectives.py only what these objectives use counts: runs stay valid when another one is added or edited."""
    files = {file: statements for file, statements in code.items() if file not in MEASURING}
    names = {f"OBJECTIVES[{name!r}]" for name in objectives}
    names = names.union(*(s.uses for file in files if file != "objectives.py" for s in files[file]))
    checksums = {file: combine(statements) for file, statements in files.items()}
    return checksums | {"objectives.py": combine(used_by(names, code["objectives.py"]))}


def measuring_checksum(code):  # of read_code -> int
    statements = [s for file in MEASURING for s in code[file]]
    names = set().union(*(s.uses for s in statements))
    return combine([*statements, *used_by(names, code["objectives.py"])])
