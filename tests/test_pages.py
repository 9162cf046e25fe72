"""The commands on pages and in help texts are accepted by their programs."""
import argparse
import glob
import importlib
import os
import re
import shlex
from pathlib import Path

import pytest

import run
import sample
from experiments import compare, gpu_check
from experiments.flags import parse_own_flags, parse_with_train_flags

ROOT = os.path.dirname(run.__file__)
PROGRAM = r"python (train\.py|sample\.py|-m experiments\.\w+)"
PAGES = ["README.md", *(os.path.join("docs", name) for name in sorted(os.listdir(os.path.join(ROOT, "docs")))
                        if name.endswith(".md"))]


def page_commands(page):  # -> (program, flags) of commands in code blocks and in backticks, even across lines
    for i, text in enumerate(Path(ROOT, page).read_text("utf-8").split("```")):
        texts = text.splitlines() if i % 2 else re.findall(r"`([^`]+)`", text)
        for each in texts:
            yield from cut_commands(" ".join(each.split("\n")))
            if page.endswith("EXERCISES.md") and not i % 2 and re.match("--(budgets|sweep|objectives) ", each):
                yield "-m experiments.compare", each        # exercises give the flags alone


def help_commands(doc):
    for line in doc.splitlines():               # two spaces separate a command from its explanation
        yield from cut_commands(re.split(r"(?<=\S)  +", line)[0])


def cut_commands(line):  # "A && B # why" -> (program, flags) of A and of B
    for part in re.split(r" && |; ", line):
        match = re.search(PROGRAM, part)
        if match:
            yield match[1], part[match.end():].partition(" > ")[0]


def check(program, flags):
    flags = re.sub(r",?\.\.\.", "", flags)
    flags = re.sub(r"\b(NAME|all_tokens|recase)\b", "mlm", re.sub(r"\b(STEPS|WIDTH|N|T|B)\b(/32)?", "32", flags))
    if flags.count('"') % 2:                    # the text continues in the next line
        flags += '"'
    argv = [word for word in shlex.split(flags, comments=True) if word != "--cuda_graph"]      # there may be no GPU
    if "--help" in argv:
        return
    if program == "train.py":
        given = run.parse(argv)
        if not {"resume", "init_from"} & set(given):
            run.get_config(argv)
    elif program == "sample.py":
        run.make_parser("", "", sample.FLAGS).parse_args(argv)
    else:
        module = importlib.import_module(program.split()[1])
        if hasattr(module, "RESERVED"):
            own, rest = parse_with_train_flags("", "", module.FLAGS, module.RESERVED, argv)
            if module is compare:
                compare.plan_cells(own, rest)
        else:
            parse_own_flags("", "", module.FLAGS, argv)


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_pages_parse(page):
    found = [*page_commands(page)]
    assert found or page.endswith("PARITY.md"), "no command was recognized"
    for command in found:
        check(*command)


def test_commands_of_help_texts_parse():
    names = ["train", "sample"]
    names += [f"experiments.{os.path.basename(path)[:-3]}" for path in glob.glob(f"{ROOT}/experiments/*.py")]
    found = [command for name in names for command in help_commands(importlib.import_module(name).__doc__)]
    assert len(found) > 30
    for command in found:
        check(*command)


def test_commands_of_the_gpu_check_parse():
    flags = argparse.Namespace(out_dir="out", device="cpu", small=False, nanogpt="")
    for _, words in gpu_check.list_steps(flags):
        if words[1] != "pytest":
            check(f"-m {words[1]}", shlex.join(words[2:]))


@pytest.mark.parametrize("page", PAGES)
def test_functions_that_a_page_quotes_are_those_of_the_code(page):
    source = Path(ROOT, "objectives.py").read_text("utf-8")
    for block in Path(ROOT, page).read_text("utf-8").split("```python\n")[1:]:
        quoted = block.split("```")[0].strip()
        name = re.match(r"def (\w+)", quoted)
        if name and f"\ndef {name[1]}(" in source:
            assert quoted in source, f"{page} quotes an older version of {name[1]}"


@pytest.mark.parametrize("page", PAGES)
def test_pictures_of_a_page_exist(page):
    path = Path(ROOT, page)
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", path.read_text("utf-8")):
        assert (path.parent / picture).is_file(), picture


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_a_page_names_exist(page):
    """"..." at the end stands for the rest of a name."""
    sources = [Path(path).read_text("utf-8") for path in glob.glob(os.path.join(ROOT, "tests", "*.py"))]
    names = [name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)]
    for start, dots in re.findall(r"`(test_\w+?)(\.\.\.)?`", Path(ROOT, page).read_text("utf-8")):
        assert any(name.startswith(start) if dots else name == start for name in names), f"{page}: {start}"
