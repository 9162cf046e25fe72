"""The command lines of the programs in experiments/: their own flags, and for those that train also train.py's."""
import argparse
import difflib

# isort: off  data silences a warning of torch's, and so comes before it
from data import fail
from run import check, flag_specs, make_parser


def parse_own_flags(prog, doc, flags, argv):  # -> Namespace of every flag of a program of experiments/
    values = {name: flag.default for name, flag in flags.items()}
    values |= vars(make_parser(prog, doc, {"flags": flags}).parse_args(argv))
    check(values, flags)
    return argparse.Namespace(**values)


def parse_with_train_flags(prog, doc, flags, reserved, argv):  # -> the program's flags, as a Namespace; other words
    """For programs that train: flags are their own; the other words are flags of train.py, but for the reserved ones,
    which the program sets itself. Fails on a flag that neither has."""
    parser = make_parser(prog, doc, {"flags, in addition to train.py's": flags})
    given, rest = parser.parse_known_args(argv)
    for word in rest:
        name = word.removeprefix("--").partition("=")[0]
        if isinstance(getattr(flag_specs().get(name.removeprefix("no-")), "default", None), bool):
            name = name.removeprefix("no-")
        if word.startswith("--") and name in reserved:
            fail(f"--{name}: is set by this program itself. Try its own flags, {prog} --help")
        if word.startswith("--") and name not in flag_specs():
            near = difflib.get_close_matches(name, {*flags, *flag_specs()} - reserved, 1)
            fail(f"unknown argument --{name}. Try {f'--{near[0]}' if near else f'{prog} --help'}")
    values = {name: flag.default for name, flag in flags.items()} | vars(given)
    check(values, flags)
    return argparse.Namespace(**values), rest
