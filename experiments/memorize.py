"""How often must a model read a random string until it recites it? Canaries, after Carlini et al. 2019.

    python -m experiments.memorize --max_iters 1000
    python -m experiments.memorize --max_iters 1000 --ngram_rows 0 --times 0,16,64 --out_dir out/no_ngrams

Adds lines of 64 random letters to the training text, in so many copies that the run reads each as often as --times
says, on average, and trains. For each number the table shows, of the last 48 letters after the first 16:

  bits      bits per letter that the model needs; 4.70 are log2 26
  letters   share of the letters that are the most likely byte, given the right ones before them
  recited   canaries of which all 48 are, so that the model writes the whole line at temperature 0

Flags that are not listed below are train.py's. N canaries, n letters of one
"""
import os

# isort: off  data silences a warning of torch's, and so comes before it
from data import Flag, error_reason, fail, make_rng, open_corpus, to_bytes
from experiments import evaluate
from experiments.compare import markdown, parse_ints
from experiments.flags import parse_with_train_flags
import train
from objectives import N_BYTES, Continue, get_objective, trained_use
from run import get_config, load_run, preserve_torch_state, run_program
import torch

FLAGS = {
    "times": Flag("0,1,4,16,64", "how often the run reads a canary on average, separated by commas"),
    "canaries": Flag(16, "different canaries for each number", 1, 10000),
    "data": Flag("stdlib", "text to which the canaries are added"),
    "out_dir": Flag("out/memorize", "folder of the run and of its text"),
}
RESERVED = {"data", "out_dir", "resume", "init_from"}           # of train.py's flags
LENGTH, PROMPT = 64, 16                         # letters of a canary, of which the first are the prompt
PLANTED = 0.8                                   # the share of the training text's lines, from the first, among which
# canaries are added: the run holds out the last tenth of its file


def draw_canaries(N, g):  # -> (N, LENGTH) long, lower-case letters
    return torch.randint(ord("a"), ord("z") + 1, (N, LENGTH), generator=g)


def plant(text, canaries, copies, g):  # bytes, (N, n), copies of each -> bytes with lines added at random places
    lines = text.split(b"\n")
    last = max(1, int(len(lines) * PLANTED))
    for canary in canaries.tolist():
        for i in torch.randint(last, (copies,), generator=g).tolist():
            lines[i] += b"\n" + bytes(canary)
    return b"\n".join(lines)


@torch.no_grad()
def measure(model, objective, hp, canaries):  # (N, n) -> bits per letter, share predicted, canaries recited
    x = torch.nn.functional.pad(canaries, (1, 0), value=ord("\n"))                  # each begins a line
    logits = evaluate.left_logits(model, objective, hp, x, 1 + PROMPT, LENGTH - PROMPT)
    hidden = canaries[:, PROMPT:]
    correct = logits[..., :N_BYTES].argmax(-1) == hidden                            # (N, n - PROMPT)
    return evaluate.bits_per_byte(logits, hidden), float(correct.float().mean()), int(correct.all(1).sum())


@preserve_torch_state()
def main(argv=None):  # -> exit code
    flags, rest = parse_with_train_flags("python -m experiments.memorize", __doc__, FLAGS, RESERVED, argv)
    times = [int(n) for n in parse_ints("times", flags.times, 0, 10000, "1,4,16")]
    path = os.path.join(flags.out_dir, "text.bin")
    hp = get_config([*rest, "--data", path])
    objective = get_objective(hp)
    if not trained_use(objective, Continue, hp):
        fail(f"--objective {hp.objective}: does not continue a text. Try clm")
    if hp.block_size <= LENGTH + 8:             # with what stands around a prompt
        fail(f"--block_size {hp.block_size}: is too short for a canary of {LENGTH} letters. Try --block_size 128")

    def count_passes(source):
        return hp.max_iters * train.passes_per_step(source, objective, hp)
    [source] = open_corpus([flags.data])
    passes = count_passes(source)
    if not passes:
        fail(f"--max_iters {hp.max_iters}: nothing is read. Try --max_iters 1000")
    text = to_bytes(source["train"])
    levels = []                                 # (canaries, copies)
    for n in times:
        g = make_rng(f"{hp.seed},{n},canaries")
        canaries = draw_canaries(flags.canaries, g)
        copies = max(1, round(n / passes)) if n else 0
        text = plant(text, canaries, copies, g)
        levels.append((canaries, copies))
    try:
        os.makedirs(flags.out_dir, exist_ok=True)
        with open(path, "xb") as f:             # never over the text of another run
            f.write(text + to_bytes(source["val"]))
    except OSError as e:
        fail(f"--out_dir {flags.out_dir}: cannot be written to ({error_reason(e)}). Try another folder")

    folder = os.path.join(flags.out_dir, "run")
    code = train.main([*rest, "--data", path, "--out_dir", folder, "--max_iters", str(hp.max_iters)],
                      with_sample=False)
    if code:
        return code
    model, hp, _ = load_run(os.path.join(folder, "ckpt.pt"), "cpu", "float32")
    passes = count_passes(*open_corpus([path]))                 # over a text that is longer now
    rows = [["times read", "copies", "bits", "letters", f"recited, of {flags.canaries}"]]
    for canaries, copies in levels:
        bits, share, recited = measure(model, objective, hp, canaries)
        rows.append([f"{copies * passes:.1f}", f"{copies}", f"{bits:.2f}", f"{share:.2f}", f"{recited}"])
    print(markdown(rows), end="")
    return 0


if __name__ == "__main__":
    run_program(main)
