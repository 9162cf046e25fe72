"""Use a trained model for what it was trained to do.

    python sample.py                                          the newest run shows itself on held-out text
    python sample.py --prompt "def main(" --num_samples 3     clm, prefix: continue a text
    python sample.py --prompt "import [MASK:2], sys"          mlm: fill the holes of a text
    python sample.py --score book.txt                         clm, prefix: bits per byte of a file
"""
# N samples, n ids so far, T = block_size positions of the model, V vocabulary
import argparse
import codecs
import itertools
import math
import re
import sys

import torch
import torch.nn.functional as F

from data import EOT, MASK, decode, encode, fail, generator, map_file
from model import new_cache
from objectives import IGNORE, OBJECTIVES
from train import (Parser, build, compressors, load_checkpoint, members, newest_run, pick_device, pick_dtype,
                   restore, set_precision)

N_BYTES = 256                                   # only bytes are ever written, ids above them never
SCORE_ROWS = 64                                 # windows scored at once

FLAGS = {
    "out_dir": ("", "run folder or checkpoint file; without it the newest run under out/"),
    "objective": ("", "of a mixture, the member to use; without it the first"),
    "prompt": (None, "the text to continue or to fill; without it a demonstration on held-out text"),
    "max_new_tokens": (300, "bytes to write at most", 0, 1 << 40),
    "num_samples": (1, "samples, drawn as one batch", 1, 1 << 16),
    "temperature": (0.8, "0 takes the most likely byte", 0.0, 1e6),
    "top_k": (0, "keep the k most likely bytes, 0 for all", 0, 1 << 40),
    "top_p": (1.0, "keep the most likely bytes that hold this probability", 0.0, 1.0),
    "seed": (1, "sample i draws from (seed, i)", 0, 2 ** 31),
    "hole": ("", "mlm: marker of a masked byte, in place of [MASK] or, for 4 bytes, [MASK:4]"),
    "order": ("confident", "mlm: fill most-confident-first, or all in parallel"),
    "score": ("", "file whose bits per byte to print"),
    "stride": (0, "with --score: bytes scored per window, block_size for disjoint cold windows; 0 for half a block", 0, 1 << 24),
    "device": ("auto", "auto, cpu, cuda, cuda:1, mps"),
    "dtype": ("auto", "of activations and weights: auto, float32, bfloat16"),
}


# ---- sampling

def pick(logits, gens, temperature=1.0, top_k=0, top_p=1.0):  # (N, ..., V) -> ids (N, ...), one generator per sample
    """Temperature 0 takes the most likely byte; top_k is cut before top_p, which counts what was there before the cut.
    Probabilities are inverted in float64, on the CPU, since float32 would lose their tails and mps has no other."""
    device, logits = logits.device, logits[..., :N_BYTES].cpu().double()
    if temperature == 0:
        return logits.argmax(-1).to(device)
    p = (logits / temperature).softmax(-1)
    p, ids = p.sort(dim=-1, descending=True, stable=True)
    if top_k:
        p[..., top_k:] = 0
    p = p.where(p.cumsum(-1) - p < top_p, 0) if top_p < 1 else p                     # the first byte always stays
    p[..., 0].clamp_(min=1e-300)
    cdf = p.cumsum(-1)
    u = torch.stack([torch.rand(p.shape[1:-1], generator=g, dtype=torch.double) for g in gens])
    at = torch.searchsorted(cdf, (u * cdf[..., -1])[..., None], right=True).clamp(max=N_BYTES - 1)
    return ids.gather(-1, at)[..., 0].to(device)


def sample_generators(seed, n):  # one on the CPU for each sample, so that it does not depend on the others
    return [generator(f"{seed},{i},sample") for i in range(n)]


@torch.inference_mode()
def generate(model, prompt, max_new_tokens, T, gens, mask="causal", cached=True, **how):  # prompt (N, n) -> yields (N,)
    """Continues each row of a prompt, a byte a row at a time; a row that wrote EOT goes on with EOT.

    mask "causal": when the context is full, its last half is encoded again, with the cache or without.
    mask "prefix": the prompt is read in both directions; ends with the block, for which the prompt must leave room."""
    N, n = prompt.shape
    assert n > 0 and (mask == "causal" or n <= T), (n, T)
    ids, ended = prompt, torch.zeros(N, dtype=torch.bool, device=prompt.device)
    start, cache = max(0, n - T), None
    for _ in range(max_new_tokens):
        if ids.size(1) - start > T:
            if mask == "prefix":
                return
            start, cache = ids.size(1) - T // 2, None
        if cached and cache is None:
            cache = new_cache(model, N, T)
        new = ids[:, start + (cache["length"] if cached else 0):]
        causal = mask == "causal" or (cached and cache["length"] > 0)
        seen = "causal" if causal else torch.full((N,), n, device=ids.device)
        h = model(new, seen, cache=cache)
        byte = pick(model.logits(h[:, -1]), gens, **how).masked_fill(ended, EOT)
        ended |= byte == EOT
        ids = torch.cat((ids, byte[:, None]), dim=1)
        yield byte
        if ended.all():
            return


@torch.inference_mode()
def fill(model, ids, gens, order="confident", **how):  # ids (N, n) with MASKs -> (N, n) without, all else unchanged
    """Fills the masked positions: "parallel" all from one forward pass, each as if alone; "confident" one a pass
    and row, where the model is surest (as in Ghazvininejad et al. 2019, with one byte a pass)."""
    ids = ids.clone()
    while (ids == MASK).any():
        logits = model.logits(model(ids, "bidirectional"))                          # (N, n, V)
        holes = ids == MASK
        if order == "confident":
            sure = logits[..., :N_BYTES].softmax(-1).amax(-1).masked_fill(~holes, -1)
            holes = holes & (torch.arange(ids.size(1), device=ids.device) == sure.argmax(1, keepdim=True))
        ids = torch.where(holes, pick(logits, gens, **how), ids)
    return ids


@torch.inference_mode()
def score(model, data, T, stride):  # data (n,) uint8 -> bits of the whole text, left to right
    """Window i codes bytes i * stride + 1 .. (i + 1) * stride from at most T bytes of context; with stride = T the
    windows are disjoint and cold. The first byte of all, which has no context, counts 8 bits."""
    n, bits = len(data), 8.0
    windows = [(max(0, at + stride - T), at, min(at + stride, n - 1)) for at in range(0, n - 1, stride)]
    for length, group in itertools.groupby(windows, lambda w: w[2] - w[0]):
        group = list(group)
        for i in range(0, len(group), SCORE_ROWS):
            bits += score_rows(model, data, group[i:i + SCORE_ROWS], length)
    return bits


@torch.inference_mode()
def score_rows(model, data, rows, length):  # rows [(first, first scored, end)] of one length -> bits
    x = torch.stack([data[a:end + 1] for a, _, end in rows]).long().to(model.embed.weight.device)      # (rows, length + 1)
    logits = model.logits(model(x[:, :-1], "causal"))
    nats = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none").view(len(rows), length)
    return sum(float(row[at - a:].double().sum()) for row, (a, at, _) in zip(nats.cpu(), rows)) / math.log(2)


# ---- a run

def load_run(path, device="auto", dtype="auto"):  # -> model, heads, settings, checkpoint; for inference
    """On the CPU float32 by default: there the cache, batches and scores are exact to rounding."""
    ckpt = load_checkpoint(path)
    hp = argparse.Namespace(**ckpt["config"])
    device = pick_device(device)
    hp.device, hp.dtype = str(device), pick_dtype("float32" if (dtype, device.type) == ("auto", "cpu") else dtype, device)
    model, heads = build(hp)
    restore(model, heads, ckpt, path)
    kind = getattr(torch, hp.dtype)
    return model.to(kind).requires_grad_(False), heads.requires_grad_(False), hp, ckpt


# ---- what each objective is for. Each mode: (model, heads, hp, flags, ids or None, held-out bytes) -> prints

def how(flags):
    return dict(temperature=flags.temperature, top_k=flags.top_k, top_p=flags.top_p)


def continue_mode(model, heads, hp, flags, prompt, held_out):
    mask = "prefix" if flags.objective == "prefix" else "causal"
    T, demo = hp.block_size, prompt is None
    if demo:
        prompt = held_out[:T // 2].tolist()
        print(f"held-out text, its first {len(prompt)} bytes as the prompt, its next bytes for comparison:")
        print(f"{decode(held_out[:T].tolist())}\n--- the model's continuation:")
    prompt = prompt or [EOT]                    # an empty prompt is the start of a document
    if mask == "prefix":
        prompt = prompt[-max(1, T - min(flags.max_new_tokens, T // 2)):]
    N, gens = flags.num_samples, sample_generators(flags.seed, flags.num_samples)
    x = torch.tensor(prompt, device=hp.device).expand(N, -1)
    stream = Stream(prompt) if N == 1 else None
    rows = []
    for byte in generate(model, x, flags.max_new_tokens, T, gens, mask, **how(flags)):
        rows.append(byte.tolist())
        if stream:
            stream.write(rows[-1][0])
    if stream:
        return stream.end()
    for i in range(N):
        print(f"--- sample {i + 1}")
        print(decode(j for j in prompt + [row[i] for row in rows] if j != EOT))


class Stream:
    """Prints bytes as they come, holding back a character that is not complete yet."""

    def __init__(self, prompt):
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for byte in prompt:
            self.write(byte)

    def write(self, byte):
        print(self.decoder.decode(bytes([byte] if byte != EOT else [])), end="", flush=True)

    def end(self):
        print(self.decoder.decode(b"", final=True), flush=True)


def fill_mode(model, heads, hp, flags, prompt, held_out):
    T = hp.block_size
    if prompt is None:
        x = held_out[None, :min(T, len(held_out))].long().to(hp.device)
        batch = OBJECTIVES[flags.objective]["make"](x, generator("demonstration", hp.device), hp)
        asked = batch["tgt"] != IGNORE
        masked = x.masked_fill(asked, MASK)
        print(f"clean:\n{decode(x[0])}\n--- {int(asked.sum())} bytes masked:\n{decode(masked[0])}\n--- filled:")
        out = fill(model, masked, sample_generators(flags.seed, 1), flags.order, **how(flags))
        print(decode(out[0]))
        right = int((out == x)[asked].sum())
        return print(f"--- {right} of {int(asked.sum())} masked bytes are the original ones")
    if MASK not in prompt:
        fail(f"--prompt: has no hole. Try one with {flags.hole or '[MASK] or [MASK:4]'} in it")
    N, gens = flags.num_samples, sample_generators(flags.seed, flags.num_samples)
    ids = torch.tensor(prompt, device=hp.device).repeat(N, 1)
    while (ids[0] == MASK).any():               # a text longer than the block is filled window by window
        at = int((ids[0] == MASK).byte().argmax())
        a = max(0, min(at - T // 4, ids.size(1) - T))
        ids[:, a:a + T] = fill(model, ids[:, a:a + T], gens, flags.order, **how(flags))
    for i in range(N):
        print((f"--- sample {i + 1}\n" if N > 1 else "") + decode(ids[i]))


def parse_holes(text, marker):  # bytes -> ids; [MASK] and [MASK:4], or the marker given, become MASK ids
    pattern = re.escape(marker) if marker else rb"\[MASK(?::(\d{1,6}))?\]"
    ids, end = [], 0
    for match in re.finditer(pattern, text):
        count = int(match[1]) if not marker and match[1] else 1
        ids += encode(text[end:match.start()]) + [MASK] * count
        end = match.end()
    return ids + encode(text[end:])


def score_mode(model, hp, flags):
    try:
        T, data = hp.block_size, map_file(flags.score, "--score")
    except RuntimeError as e:
        fail(f"--score {flags.score}: cannot be read ({str(e).splitlines()[0]}). Try another file")
    stride = flags.stride or max(1, T // 2)
    if stride > T:
        fail(f"--stride {stride}: is more than the block of {T}. Try --stride {T}")
    bits = score(model, data, T, stride)
    print(f"{flags.score}: {bits / len(data):.4f} bits per byte ({bits * math.log(2) / len(data):.4f} nats) over {len(data):,} bytes, "
          f"windows of {T}, stride {stride}; {compressors(data)}")


MODES = {"clm": continue_mode, "prefix": continue_mode, "mlm": fill_mode}


def parse(argv):
    parser = Parser(prog="sample.py", usage="python sample.py [flags below]", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, (default, text, *_) in FLAGS.items():
        shown = "" if default in ("", None) else f" [{default}]"
        parser.add_argument(f"--{flag}", default=default, type=str if default is None else type(default), metavar="X", help=text + shown)
    flags = parser.parse_args(argv)
    for flag, spec in FLAGS.items():
        if len(spec) == 4 and not spec[2] <= getattr(flags, flag) <= spec[3]:
            fail(f"--{flag} {getattr(flags, flag)}: must lie between {spec[2]} and {spec[3]}. Try the default")
    if flags.order not in ("confident", "parallel"):
        fail(f"--order {flags.order}: unknown. Try confident or parallel")
    return flags


def main(argv=None):  # -> exit code
    flags = parse(sys.argv[1:] if argv is None else argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    path = flags.out_dir or newest_run()
    set_precision(pick_device(flags.device))
    model, heads, hp, ckpt = load_run(path, flags.device, flags.dtype)
    names = [m["name"] for m in members(hp)]
    flags.objective = flags.objective or names[0]
    if flags.objective not in names:
        fail(f"--objective {flags.objective}: {path} was trained as {hp.objective}. Try --objective {names[0]}")
    if flags.score:
        if OBJECTIVES[flags.objective].get("bpb") != "exact":
            fail(f"--score: {flags.objective} does not code text from the left. Try a run trained as clm or prefix")
        return score_mode(model, hp, flags)
    prompt = None if flags.prompt is None else encode(flags.prompt)
    if prompt is not None and MODES.get(flags.objective) is fill_mode:
        prompt = parse_holes(bytes(prompt), flags.hole.encode())
    if flags.objective not in MODES:
        return print(f"{path}: sample.py has no mode for {flags.objective} yet")
    MODES[flags.objective](model, heads, hp, flags, prompt, ckpt["held_out"])


if __name__ == "__main__":
    sys.exit(main())
