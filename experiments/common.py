"""Shared by the programs in experiments/: flags, the weights that are measured, and checksums of files."""
import json
import os
import sys
import zlib
from argparse import Namespace
from pathlib import Path

from data import fail
from objectives import OBJECTIVES
from run import checkpoint_path, load_run, make_parser, member_weights, parse
import sample

ROOT = Path(__file__).resolve().parents[1]
TRAINING = "data.py", "model.py", "objectives.py", "run.py", "train.py"


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


def load_latest(path, device="auto", dtype="auto"):  # -> what load_run returns, of ckpt.pt if path is a folder
    model, hp, ckpt = load_run(checkpoint_path(path), device, dtype)
    sample.note(f"{ckpt['path']}: {hp.objective}, step {ckpt['step']} of {hp.max_iters}")
    return model, hp, ckpt


def read_json(path):  # -> its contents, or {} if there is no such file
    return json.loads(Path(path).read_text("utf-8")) if os.path.exists(path) else {}


def write_json(path, contents):  # a killed process leaves no half file
    Path(path + ".tmp").write_text(json.dumps(contents), "utf-8")
    os.replace(path + ".tmp", path)


def checksums(files):  # paths, absolute or from ROOT -> {path from ROOT: checksum}
    names = sorted({os.path.relpath(ROOT / file, ROOT) for file in files})
    return {name: zlib.crc32((ROOT / name).read_bytes()) for name in names}


def training_files(objective):  # a name or a mixture -> the files that train it, with that of a fork's objective
    fields = "corrupt", "loss", "heads", "n_bytes"
    functions = [getattr(OBJECTIVES[name], field) for name in member_weights(objective) for field in fields]
    modules = [sys.modules[function.__module__] for function in functions]
    return {*TRAINING, *(module.__file__ for module in modules if hasattr(module, "__file__"))}     # not of a notebook


# of the files that measure, as this process has imported them
MEASURING = checksums(["sample.py", *(f"experiments/{name}.py" for name in ("bench", "evaluate", "score"))])
