"""The command lines of the programs in experiments/: their own flags, and for those that train also train.py's."""
from argparse import Namespace

from data import fail
from run import make_parser, parse


def parse_own_flags(prog, doc, flags, argv):  # -> Namespace of every flag of a program of experiments/
    given = make_parser(prog, doc, {"flags": flags}).parse_args(argv)
    return with_defaults(flags, given)


def parse_with_train_flags(prog, doc, flags, reserved, argv):  # -> the program's flags, as a Namespace; other words
    """For programs that train: flags are their own; the other words are flags of train.py, but for the reserved ones,
    which the program sets itself. Fails on a flag that neither has."""
    given, rest = make_parser(prog, doc, {"flags, in addition to train.py's": flags}).parse_known_args(argv)
    for name in sorted(reserved & set(parse(rest))):
        fail(f"--{name}: is set by this program itself. Try its own flags, {prog} --help")
    return with_defaults(flags, given), rest


def with_defaults(flags, given):
    return Namespace(**{name: flag.default for name, flag in flags.items()} | vars(given))
