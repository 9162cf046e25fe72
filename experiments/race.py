"""How long does a whole training run take, from start to exit, compared with nanoGPT's own CPU example?

    git clone https://github.com/karpathy/nanoGPT ../nanoGPT && pip install numpy requests
    (cd ../nanoGPT && python data/shakespeare_char/prepare.py)
    python -m experiments.race --nanogpt ../nanoGPT

Runs in turns, each as a program of its own: nanoGPT's train.py with the flags that its README gives for a CPU (4 layers
of width 128, blocks of 64, 2,000 steps), and train.py of this repository with the same size, blocks and text. Prints
the seconds of both, and their losses on the whole held-out tenth of the text, in windows of 64 that are read without
any context before them. Flags that are not listed below are train.py's.
"""
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time

from data import Flag, fail
from experiments.bench import load_nanogpt
from experiments.common import ROOT, parse_with_train_flags
from run import load_run, run_program
import torch
import torch.nn.functional as F

FLAGS = {
    "nanogpt": Flag("../nanoGPT", "folder of a clone of karpathy/nanoGPT whose shakespeare_char data are prepared"),
    "repeats": Flag(3, "number of runs of each side; medians are printed", 1),
}
RESERVED = {"data", "out_dir", "resume", "init_from", "device", "block_size", "n_layer", "n_embd", "objective"}
T = 64
NANOGPT_FLAGS = ["config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=20",
                 "--log_interval=1", f"--block_size={T}", "--batch_size=12", "--n_layer=4", "--n_head=4",
                 "--n_embd=128", "--max_iters=2000", "--lr_decay_iters=2000", "--dropout=0.0"]
OUR_FLAGS = ["--device", "cpu", "--block_size", str(T), "--n_layer", "4", "--n_embd", "128",
             "--batch_size", "12", "--max_iters", "130", "--ngram_rows", "32768"]               # flags given may differ


def run_timed(argv, folder):  # -> seconds from start to exit
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, *argv], cwd=folder, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode:
        fail(f"{' '.join(argv)} in {folder} failed: {done.stderr.strip().splitlines()[-1:]}")
    return seconds


def windows(ids):  # (n,) -> inputs and targets (N, T): all N disjoint windows of T = 64 bytes of the held-out tenth
    held_out = ids[int(len(ids) * 0.9):]
    N = (len(held_out) - 1) // T
    return held_out[:N * T].view(N, T), held_out[1:N * T + 1].view(N, T)


@torch.no_grad()
def mean_nats(predict, ids):  # predict: (N, T) -> logits (N, T, V)
    inp, tgt = windows(ids)
    nats = [F.cross_entropy(predict(x).flatten(0, 1), y.flatten(), reduction="sum")
            for x, y in zip(inp.split(256), tgt.split(256))]
    return float(sum(nats)) / tgt.numel()


def nanogpt_loss(folder, out_dir, text):  # -> nats per byte of the checkpoint that nanoGPT saved
    module = load_nanogpt(folder)
    ckpt = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location="cpu", weights_only=False)
    model = module.GPT(module.GPTConfig(**ckpt["model_args"]))
    model.load_state_dict(ckpt["model"])
    model.eval()
    with open(os.path.join(folder, "data", "shakespeare_char", "meta.pkl"), "rb") as f:
        stoi = pickle.load(f)["stoi"]
    ids = torch.tensor([stoi[character] for character in text])
    return mean_nats(lambda x: model(x, x)[0], ids)             # with targets it returns the logits of all positions


def main(argv=None):
    flags, rest = parse_with_train_flags("python -m experiments.race", __doc__, FLAGS, RESERVED, argv)
    path = os.path.join(flags.nanogpt, "data", "shakespeare_char", "input.txt")
    if not os.path.isfile(path) or not os.path.isfile(path.replace("input.txt", "train.bin")):
        fail(f"--nanogpt {flags.nanogpt}: its text is not prepared. Try python data/shakespeare_char/prepare.py there")
    with open(path, encoding="ascii") as f:     # one character is one byte, so losses can be compared
        text = f.read()
    seconds = {"nanoGPT": [], "nanoPretext": []}
    losses = {"nanoGPT": [], "nanoPretext": []}
    for i in range(flags.repeats):
        with tempfile.TemporaryDirectory() as work:
            theirs = os.path.join(work, "theirs")
            seconds["nanoGPT"].append(run_timed(["train.py", *NANOGPT_FLAGS, f"--out_dir={theirs}"], flags.nanogpt))
            losses["nanoGPT"].append(nanogpt_loss(flags.nanogpt, theirs, text))
            ours = os.path.join(work, "ours")
            argv = ["train.py", *OUR_FLAGS, *rest, "--data", os.path.abspath(path), "--out_dir", ours]
            seconds["nanoPretext"].append(run_timed(argv, ROOT))
            model, _, _ = load_run(os.path.join(ours, "ckpt.pt"), "cpu", "float32")
            losses["nanoPretext"].append(mean_nats(lambda x: model.logits(model(x)), torch.tensor([*text.encode()])))
        for side in seconds:
            print(f"run {i + 1}: {side:12s} {seconds[side][-1]:7.1f} s, {losses[side][-1]:.4f} nats/byte", flush=True)
    theirs, ours = (statistics.median(seconds[side]) for side in ("nanoGPT", "nanoPretext"))
    print(f"medians: {theirs:.1f} s and {ours:.1f} s, a ratio of {theirs / ours:.1f}; "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    run_program(main)
