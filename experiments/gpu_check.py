"""Check and measure this repository on an NVIDIA GPU, and write one report of plain text.

    python -m experiments.gpu_check                                 half an hour of steps, the most useful first
    python -m experiments.gpu_check --nanogpt ../nanoGPT            with a checkout of karpathy/nanoGPT beside ours
    python -m experiments.gpu_check --minutes 600                   until all steps are done, the comparison included
    python -m experiments.gpu_check --device cpu --small            tries this program itself on a CPU, in minutes

A step is a command in a process of its own. Its output is kept in --out_dir; the same command again continues with
the steps that have not finished. Please send report.txt to the authors, whatever it says.
"""
import os
import platform
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass

# isort: off  data silences a warning of torch's, and so comes before it
from data import Flag, error_reason, fail
from experiments.flags import parse_own_flags
from run import resolve_device, run_program
import torch

FLAGS = {
    "minutes": Flag(30.0, "time for all steps; the step that runs when it ends is stopped", 0.01, 1e5),
    "out_dir": Flag("out/gpu_check", "folder of the report and of each step's output"),
    "device": Flag("cuda", "cuda, cuda:1, or cpu to try this program"),
    "small": Flag(False, "tiny models and few steps, to try this program"),
    "nanogpt": Flag("", "folder of a checkout of karpathy/nanoGPT, measured in the same runs"),
    "data": Flag("", "text for the time to a loss, such as tinyshakespeare; without it that step is left out"),
}
SIZE_384 = "--n_layer 6 --n_head 6 --n_embd 384 --block_size 256 --batch_size 64"
SIZE_768 = "--n_layer 12 --n_head 6 --n_embd 768 --block_size 1024 --batch_size 64"
SIZE_128 = "--n_layer 4 --n_head 4 --n_embd 128 --block_size 64 --batch_size 12"
SMALL = "--n_layer 2 --n_head 2 --n_embd 32 --block_size 128 --batch_size 4 --ngram_rows 64 --eval_iters 1"


@dataclass
class Step:
    name: str
    words: list                                 # arguments of the Python interpreter


def list_steps(flags):  # -> [Step], the most useful first
    """Numerics before speed, speed before training."""
    cuda = [] if flags.device == "cpu" else ["--cuda_graph"]
    peer = ["--nanogpt", flags.nanogpt] if flags.nanogpt else []
    device = ["--device", flags.device]

    def bench(size, *words):
        size = SMALL if flags.small else size
        repeats = ["--repeats", "1", "--steps", "1", "--new", "8"] if flags.small else []
        return ["-m", "experiments.bench", *size.split(), *device, *repeats, *words]

    def compare(size, *words):
        size = SMALL if flags.small else size
        folder = os.path.join(flags.out_dir, "compare")
        return ["-m", "experiments.compare", *size.split(), *device, "--out_dir", folder, *words]

    def sweep(name, values):                    # of a setting, which is then not set by the size
        words = compare(SIZE_384, "--objectives", "clm", "--budgets", "4" if flags.small else "1000")
        if f"--{name}" in words:
            at = words.index(f"--{name}")
            del words[at:at + 2]
        return [*words, "--sweep", f"{name}={values}"]
    fast = ["--compile", *cuda]
    steps = [
        Step("attention and steps on the GPU equal plain ones", ["-m", "pytest", "-q", "-rs", "tests/test_gpu.py"]),
        Step("training, width 384", bench(SIZE_384, "--parts", "train", "--objectives", "clm", *fast, *peer)),
        Step("training, width 128", bench(SIZE_128, "--parts", "train", "--objectives", "clm", *fast, *peer)),
        Step("training, width 768, every mask", bench(SIZE_768, "--parts", "train", "--objectives", "clm,mlm,prefix",
                                                      *fast, *peer)),
        Step("decoding, width 384", bench(SIZE_384, "--parts", "decode", "--objectives", "clm", *fast, *peer)),
        Step("decoding with drafts, width 384", bench(SIZE_384, "--parts", "decode", "--objectives", "mtp", *fast)),
    ]
    if flags.data:
        iters = "4" if flags.small else "700"
        words = ["--parts", "loss", "--objectives", "clm", "--data", flags.data, "--max_iters", iters]
        steps.append(Step("time to a loss", bench(SIZE_384, *words, *cuda, *peer)))
    block_size = "128" if flags.small else "512"
    steps += [
        Step("all tests", ["-m", "pytest", "-q", "-rs", "tests"]),
        Step("learning rate", sweep("learning_rate", ".005,.01,.02")),
        Step("batch size", sweep("batch_size", "4,8" if flags.small else "32,64,128")),
        Step("n-gram rows", sweep("ngram_rows", "0,65536,262144")),
        Step("every objective", compare(SIZE_384, "--block_size", block_size,
                                        "--budgets", "4" if flags.small else "20000")),
    ]
    return steps


def run_step(step, path, seconds):  # -> verdict; the output goes to path, which is renamed once the step has ended
    begin = time.perf_counter()
    with open(path + ".part", "w", encoding="utf-8") as f:
        try:
            done = subprocess.run([sys.executable, *step.words], stdout=f, stderr=subprocess.STDOUT, timeout=seconds)
        except subprocess.TimeoutExpired:
            return "stopped: out of time"
        verdict = "passed" if done.returncode == 0 else f"FAILED with exit code {done.returncode}"
        verdict += f", {time.perf_counter() - begin:.0f} s"
        f.write(f"\nverdict: {verdict}\n")
    os.replace(path + ".part", path)
    return verdict


def describe_machine(device):  # -> lines of text
    lines = [f"python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}"]
    if device.type != "cuda":
        return lines + [f"device: {device}"]
    p = torch.cuda.get_device_properties(device)
    lines.append(f"device: {torch.cuda.device_count()} x {p.name}, {p.total_memory >> 20:,} MiB, capability "
                 f"{p.major}.{p.minor}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv"]
        lines.append(subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip())
    except (OSError, subprocess.TimeoutExpired):
        lines.append("no nvidia-smi")
    return lines


def write_report(path, machine, steps, verdicts, folder):
    with open(path, "w", encoding="utf-8") as f:
        f.write("\n".join([*machine, ""]))
        for i, step in enumerate(steps):
            f.write(f"\n{i + 1}. {step.name}: {verdicts.get(step.name, 'not run')}")
        for i, step in enumerate(steps):
            for name in (step_file(folder, i, step), step_file(folder, i, step) + ".part"):
                if os.path.exists(name):
                    with open(name, encoding="utf-8", errors="replace") as output:
                        f.write(f"\n\n==== {i + 1}. {step.name}\npython {' '.join(step.words)}\n{output.read()}")
        f.write("\n")


def step_file(folder, i, step):  # another command is another file
    return os.path.join(folder, f"{i + 1:02d}-{zlib.crc32(' '.join(step.words).encode()):08x}.txt")


def main(argv=None):
    flags = parse_own_flags("python -m experiments.gpu_check", __doc__, FLAGS, argv)
    if flags.device.startswith("cuda") and not torch.cuda.is_available():
        fail(f"--device {flags.device}: this torch sees no NVIDIA GPU. Try --device cpu --small")
    device = resolve_device(flags.device)
    try:
        os.makedirs(flags.out_dir, exist_ok=True)
    except OSError as e:
        fail(f"--out_dir {flags.out_dir}: cannot be made ({error_reason(e)}). Try another name")
    report = os.path.join(flags.out_dir, "report.txt")
    machine = describe_machine(device)
    print("\n".join(machine), flush=True)
    steps = list_steps(flags)
    verdicts = {}
    deadline = time.perf_counter() + 60 * flags.minutes
    for i, step in enumerate(steps):
        path = step_file(flags.out_dir, i, step)
        left = deadline - time.perf_counter()
        if os.path.exists(path):
            with open(path, encoding="utf-8", errors="replace") as f:
                verdicts[step.name] = f.read().rpartition("verdict: ")[2].strip() + " (in an earlier call)"
        elif left > 1:
            verdicts[step.name] = run_step(step, path, left)
        print(f"{i + 1}/{len(steps)} {step.name}: {verdicts.get(step.name, 'not run: out of time')}", flush=True)
        write_report(report, machine, steps, verdicts, flags.out_dir)
    print(f"report: {report}")
    return 1 if any("FAILED" in verdict for verdict in verdicts.values()) else 0


if __name__ == "__main__":
    run_program(main)
