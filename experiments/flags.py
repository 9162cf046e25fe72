"""The command-line flags of the programs in experiments/."""
from argparse import Namespace

from data import fail
from run import make_parser, parse


def parse_own_flags(prog, doc, flags, argv):  # for a program that reads only its own flags -> Namespace of them
    given = make_parser(prog, doc, {"flags": flags}).parse_args(argv)
    return with_defaults(flags, given)


def parse_with_train_flags(prog, doc, flags, reserved, argv):  # for a program that trains -> Namespace, list of words
    """Returns the program's own flags as a Namespace, and the other words of argv, which are flags of train.py. Fails
    on a flag that neither has, and on a reserved one: a flag of train.py that the program sets itself."""
    given, rest = make_parser(prog, doc, {"flags, in addition to train.py's": flags}).parse_known_args(argv)
    for name in sorted(reserved & set(parse(rest))):
        fail(f"--{name}: is set by this program itself. Try its own flags, {prog} --help")
    return with_defaults(flags, given), rest


def to_words(given):  # {name: value} -> the words of a command line
    words = []
    for name, value in given.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            values = value if isinstance(value, list) else [value]
            words += [f"--{name}", *map(str, values)]
    return words


def with_defaults(flags, given):
    return Namespace(**{name: flag.default for name, flag in flags.items()} | vars(given))
