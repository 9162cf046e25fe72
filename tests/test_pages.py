"""Commands on pages and in help texts are accepted by their programs, and figures are those of curves.csv."""
import csv
import glob
import importlib
import itertools
import os
import re
import shlex
import statistics
from pathlib import Path

import pytest

import run
import sample
import train
from experiments import compare
from experiments.common import parse_own_flags, parse_with_train_flags

ROOT = os.path.dirname(run.__file__)
PROGRAM = r"python (train\.py|sample\.py|-m experiments\.\w+)"
PAGES = ["README.md", *(os.path.join("docs", name) for name in sorted(os.listdir(os.path.join(ROOT, "docs")))
                        if name.endswith(".md"))]


@pytest.fixture(params=PAGES)
def page(request):
    return request.param


def page_commands(page):  # -> (program, flags) of commands in code blocks and in backticks, even across lines
    for i, text in enumerate(Path(ROOT, page).read_text("utf-8").split("```")):
        text = text.replace("\\\n", " ")         # a command goes on in the next line
        texts = text.splitlines() if i % 2 else re.findall(r"`([^`]+)`", text)
        for each in texts:
            yield from cut_commands(" ".join(each.split("\n")))
            if page.endswith("EXERCISES.md") and not i % 2 and re.match("--(budgets|sweep|objectives) ", each):
                yield "-m experiments.compare", each        # exercises give the flags alone


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
            if module is compare and "--sweep init_from" not in flags:              # such runs do not exist here
                compare.plan_runs(own, rest, crc=0)
        else:
            parse_own_flags("", "", module.FLAGS, argv)


def test_commands_of_pages_parse(page):
    found = [*page_commands(page)]
    assert found, "no command was recognized"
    for command in found:
        check(*command)


def test_commands_of_help_texts_parse():
    names = ["train", "sample"]
    names += [f"experiments.{os.path.basename(path)[:-3]}" for path in glob.glob(f"{ROOT}/experiments/*.py")]
    lines = [line for name in names for line in importlib.import_module(name).__doc__.splitlines()]
    # two spaces separate a command from its explanation
    found = [command for line in lines for command in cut_commands(re.split(r"(?<=\S)  +", line)[0])]
    assert len(found) > 30
    for command in found:
        check(*command)


def read_prose(path):  # -> the text of a page without its code
    return re.sub(r"```.*?```|`[^`]*`", "", path.read_text("utf-8"), flags=re.DOTALL)


def anchors(path):  # -> what a link to this page may name after #
    headings = re.findall(r"^#+ (.*)", read_prose(path), re.MULTILINE)
    named = re.findall(r'<a id="(.*?)">', read_prose(path))
    return {*named, *(re.sub(r"<.*?>|[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings)}


def test_links_and_pictures_of_a_page_exist(page):
    path = Path(ROOT, page)
    for file, anchor in re.findall(r"\]\(([\w./-]*)#?([\w-]*)\)", read_prose(path)):
        target = path.parent / file if file else path
        assert target.exists(), f"{page}: {file}"
        assert not anchor or anchor in anchors(target), f"{page}: {file}#{anchor}"


def test_tests_that_a_page_names_exist(page):
    """"..." at the end stands for the rest of a name."""
    sources = [Path(path).read_text("utf-8") for path in glob.glob(os.path.join(ROOT, "tests", "*.py"))]
    names = [name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)]
    for start, dots in re.findall(r"`(test_\w+?)(\.\.\.)?`", Path(ROOT, page).read_text("utf-8")):
        assert any(name.startswith(start) if dots else name == start for name in names), f"{page}: {start}"


def test_the_mixture_of_the_page_trains_its_second_member_more_and_more(monkeypatch):
    page = Path(ROOT, "docs", "EXTENDING.md").read_text("utf-8")
    code = re.search(r"</a>Mixtures.*?```python\n(.*?)```", page, re.DOTALL)[1]
    monkeypatch.setattr(train, "member_of_step", train.member_of_step)      # the page replaces it
    monkeypatch.setattr(train, "main", lambda argv: None)
    exec(code, {})
    members = [run.Member("clm", 0.5, 0), run.Member("mlm", 0.5, 0)]
    chosen = [train.member_of_step(members, step).objective for step in range(1200)]
    counts = [chosen[start:start + 400].count("mlm") for start in (0, 400, 800)]
    assert counts == sorted(counts) and counts[0] < 100 and counts[2] > 300


# ---- figures
NUMBER = r"(?:<= )?[-+]?\d[\d,]*(?:\.\d+)?%?"


def read_curves():  # -> {(name, steps, metric): {seed: value}}
    figures = {}
    with open(os.path.join(ROOT, "docs", "curves.csv"), encoding="utf-8", newline="") as f:
        for name, steps, seed, metric, value in [*csv.reader(f)][1:]:
            figures.setdefault((name, steps, metric), {})[seed] = float(value)
    return figures


def right_row(row, head, metrics, figures):  # a row of a table, its comment in two parts -> the row with right figures
    _, label, *cells, _ = row.split("|")
    settings = f"{head}, {label}"               # what the row says comes last, and counts
    steps = re.findall(r"([\d,]+) steps", settings)[-1].replace(",", "")
    seed = re.match(r"(?:.*seed (\d+))?", settings)[1]
    known = {name for name, *_ in figures}
    names = [name if name in known else re.split(r", | \(", name)[0] for name in label.strip(" *`").split(" - ")]
    names = [head.partition(",")[0].replace("*", name) for name in names]
    for i, (cell, metric) in enumerate(zip(cells, metrics.split(", "), strict=True)):
        number = re.search(NUMBER, cell)
        if number and metric != "-":
            either, _, own_steps = metric.partition("@")
            values = [look_up(figures, name, own_steps or steps, seed, either) for name in names]
            means = [statistics.fmean(v) for v in values if v]
            right = written_like(number[0], means) if len(means) == len(names) else "no figure"
            cells[i] = cell.replace(number[0], right, 1)
            error = re.search(r"± (\S+)", cell)
            if error and len(values[0]) > 2:    # the standard error of a mean over seeds
                standard_error = statistics.stdev(values[0]) / len(values[0]) ** 0.5
                cells[i] = cells[i].replace(error[0], "± " + written_like(error[1], [standard_error]))
    return "|".join(["", label, *cells, ""])


def look_up(figures, name, steps, seed, metrics):  # "a|b" -> the values, of all seeds or one, of the metric there is
    for metric in metrics.split("|"):
        by_seed = figures.get((name, steps, metric))
        if by_seed:
            return [value for own_seed, value in by_seed.items() if seed in (own_seed, None)]
    return []


def written_like(number, values):  # "<= 1.23", "45%" or "+0.12"; one value, or two whose difference it shows -> str
    digits = len(number.strip("%").partition(".")[2])
    value = (values[0] - sum(values[1:])) * (100 if "%" in number else 1)
    return f"{'<= ' * ('<=' in number)}{value:{'+' * (len(values) > 1)}.{digits}f}{'%' * ('%' in number)}"


@pytest.mark.parametrize("page", ["README.md", "docs/NOTES.md", "docs/RESULTS.md"])
def test_figures_of_tables_are_those_of_curves_csv(page):
    """A comment above each table names the metrics of its columns, which show means over the seeds of curves.csv:
    <!-- curves.csv: *, 1200 steps: left_to_right|bound, -, task@8000 -->. * is the name in the first cell, - any other
    figure, a|b the metric that there is. Or the comment says why not: <!-- not from curves.csv: settings -->"""
    figures = read_curves()
    comment = ""
    wrong = []
    for before, line in itertools.pairwise(Path(ROOT, page).read_text("utf-8").splitlines()):
        if line.startswith("|") and not before.startswith("|"):                     # the heading of a table
            comment = before
        elif line.startswith("|") and not line.startswith("|---"):
            declared = re.match(r"<!-- curves\.csv: (.*?): (.*?)(?:;.*)? -->", comment)
            right = right_row(line, *declared.groups(), figures) if declared else line
            wrong += [right] if right != line else []
            is_explained = declared or comment.startswith("<!-- not from curves.csv: ")
            assert is_explained or not re.search(rf"\| \**{NUMBER}\** \|", line), f"{page}: where is this from? {line}"
    assert not wrong, f"{page}: the right rows:\n" + "\n".join(wrong)
