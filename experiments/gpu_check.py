"""Check and measure this repository on an NVIDIA GPU, and write one report of plain text.

    python -m experiments.gpu_check                                 half an hour, the most useful steps first
    python -m experiments.gpu_check --nanogpt ../nanoGPT            also measures a checkout of karpathy/nanoGPT
    python -m experiments.gpu_check --minutes 600                   time enough for all steps
    python -m experiments.gpu_check --device cpu --small            tests this program itself on a CPU, in minutes

Each step is a process of its own, whose output is kept in --out_dir. Please send report.txt to the authors.
"""
import os
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

from data import Flag
from experiments.common import parse_own_flags
from objectives import OBJECTIVES
from run import resolve_device, run_program
from torch.utils.collect_env import get_pretty_env_info

FLAGS = {
    "minutes": Flag(30.0, "time for all steps; the step that is running at the end is stopped", 0.01, 1e5),
    "out_dir": Flag("out/gpu_check", "folder of the report and of each step's output"),
    "device": Flag("cuda", "cuda, cuda:1, or cpu to test this program"),
    "small": Flag(False, "tiny models and few steps, to test this program"),
    "nanogpt": Flag("", "folder of a checkout of karpathy/nanoGPT, measured in the same runs"),
}
SIZE_384 = "--n_layer 6 --n_head 6 --n_embd 384 --block_size 256 --batch_size 64"
SIZE_768 = "--n_layer 12 --n_head 6 --n_embd 768 --block_size 1024 --batch_size 32"
SIZE_128 = "--n_layer 4 --n_head 4 --n_embd 128 --block_size 64 --batch_size 12"
SMALL = "--n_layer 2 --n_head 2 --n_embd 32 --block_size 128 --batch_size 4 --ngram_rows 64 --eval_iters 1"
FIRST = next(iter(OBJECTIVES))
OF_EACH_MASK = {objective.attention: name for name, objective in reversed(OBJECTIVES.items())}      # the first of each
DRAFTING = [name for name, o in OBJECTIVES.items() if getattr(o.uses.get("continue"), "drafter", None)]
Step = namedtuple("Step", "name words")         # words: arguments of the Python interpreter


def list_steps(flags):  # -> [Step], the most useful first: tests, speed, training
    def command(program, size, *words):
        words = [*(SMALL if flags.small else size).split(), "--device", flags.device, *words]
        return ["-m", f"experiments.{program}", *words]

    def bench(size, part, objective, *words):
        few = "--repeats 1 --steps 1 --new 8" if flags.small else ""
        return command("bench", size, *few.split(), "--parts", part, "--objectives", objective, *words)
    graph = [] if flags.device == "cpu" else ["--cuda_graph"]
    peer = ["--nanogpt", flags.nanogpt] if flags.nanogpt else []
    fast = ["--compile", *graph, *peer]
    masks = ",".join(reversed(OF_EACH_MASK.values()))
    tests = ["-m", "pytest", "-q", "-rs", "tests", "-k"]
    steps = [
        Step("the GPU's tests", [*tests, "(gpu or cuda) and not never_wait"]),
        Step("training, width 384", bench(SIZE_384, "train", FIRST, *fast)),
        Step("training, width 128", bench(SIZE_128, "train", FIRST, *fast)),
        Step("training, width 768", bench(SIZE_768, "train", FIRST, *fast)),
        Step("training, width 768, every mask", bench(SIZE_768, "train", masks, "--compile")),
        Step("decoding, width 384", bench(SIZE_384, "decode", FIRST, *fast)),
        Step("decoding with drafts, width 384", bench(SIZE_384, "decode", DRAFTING[0], *fast)),
    ]
    words = ["--budgets", "4"] if flags.small else ["--budgets", "20000"]
    long_rows = SIZE_384.replace("--block_size 256", "--block_size 512")
    out = os.path.join(flags.out_dir, f"compare-{time.strftime('%m%d-%H%M%S')}")   # compare refuses runs of older code
    steps.append(Step("every objective", command("compare", long_rows, "--out_dir", out, *words)))
    return [*steps, Step("every objective, compiled and captured", [*tests, "(gpu or cuda) and never_wait"])]


def run_step(step, path, seconds):  # writes the output to path -> verdict
    begin = time.perf_counter()
    with open(path, "w", encoding="utf-8") as f:
        try:
            done = subprocess.run([sys.executable, *step.words], stdout=f, stderr=subprocess.STDOUT, timeout=seconds)
        except subprocess.TimeoutExpired:
            return "stopped: out of time"
    verdict = "passed" if done.returncode == 0 else f"FAILED with exit code {done.returncode}"
    return f"{verdict}, {time.perf_counter() - begin:.0f} s"


def main(argv=None):  # -> exit code
    flags = parse_own_flags("python -m experiments.gpu_check", __doc__, FLAGS, argv)
    resolve_device(flags.device)                # fails now if there is no GPU
    machine = get_pretty_env_info()
    os.makedirs(flags.out_dir, exist_ok=True)
    report = os.path.join(flags.out_dir, "report.txt")
    steps = list_steps(flags)
    deadline = time.perf_counter() + 60 * flags.minutes
    verdicts = dict.fromkeys(range(len(steps)), "not run")
    outputs = ""
    for i, step in enumerate(steps):
        path = os.path.join(flags.out_dir, f"{i + 1:02d}.txt")
        left = deadline - time.perf_counter()
        if left > 1:
            verdicts[i] = run_step(step, path, left)
            outputs += f"\n\n==== {i + 1}. {step.name}\npython {' '.join(step.words)}\n"
            outputs += Path(path).read_text("utf-8", "replace")
        print(f"{i + 1}/{len(steps)} {step.name}: {verdicts[i]}", flush=True)
        with open(report, "w", encoding="utf-8") as f:          # after each step: this program may be killed
            summary = [f"{k + 1}. {each.name}: {verdicts[k]}" for k, each in enumerate(steps)]
            f.write("\n".join([machine, "", *summary]) + outputs + "\n")
    print(f"report: {report}")
    return 1 if any("FAILED" in verdict for verdict in verdicts.values()) else 0


if __name__ == "__main__":
    run_program(main)
