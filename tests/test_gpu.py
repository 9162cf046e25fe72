"""What must hold on a GPU; the same checks run on the CPU where they mean something there."""
import argparse

import pytest
import torch
from conftest import randomized

from data import make_rng
from experiments import bench, compare, gpu_check
from experiments.flags import parse_with_train_flags
from model import ModelConfig, can_attend, choose_attention
from run import get_config

H, T = 2, 160
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]
RULES = ["causal", "bidirectional", "one prefix", "a prefix for each row", "documents", "any mask"]


def rule_arguments(rule, B, device):  # -> arguments of choose_attention, allowed (B, T, T)
    g = make_rng("rule")
    prefix = torch.randint(0, T, (B,), generator=g).to(device)
    doc = (torch.rand(B, T, generator=g) < 0.05).long().cumsum(1).to(device)
    mask = (torch.rand(B, T, T, generator=g) < 0.5).to(device) | torch.eye(T, dtype=torch.bool, device=device)
    k = torch.arange(T, device=device)
    q = k[:, None]
    if rule == "causal":
        return dict(prefix=0), can_attend(q, k, 0).expand(B, T, T)
    if rule == "bidirectional":
        return dict(prefix=T), can_attend(q, k, T).expand(B, T, T)
    if rule == "one prefix":
        return dict(prefix=50), can_attend(q, k, 50).expand(B, T, T)
    if rule == "a prefix for each row":
        return dict(prefix=prefix), can_attend(q, k, prefix[:, None, None])
    if rule == "documents":
        return dict(prefix=prefix, doc=doc), can_attend(q, k, prefix[:, None, None], doc[:, :, None], doc[:, None, :])
    return dict(prefix=0, mask=mask), mask


@pytest.mark.parametrize("D", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("device", DEVICES)
def test_attention_equals_the_dense_rule_forward_and_backward(device, rule, D):
    """Float32 inputs; on a GPU also bfloat16, with the rounding of that type."""
    B = 64 if device == "cuda" else 2
    for dtype in [torch.float32, torch.bfloat16] if device == "cuda" else [torch.float32]:
        arguments, allowed = rule_arguments(rule, B, device)
        g = make_rng("attention", device)
        q, k, v, out_grad = (torch.randn(B, H, T, D, generator=g, device=device).to(dtype) for _ in range(4))
        config = ModelConfig(1, H, H * D)
        results = []
        for kind in ("fast", "dense"):
            inputs = [t.detach().to(dtype if kind == "fast" else torch.float64).requires_grad_() for t in (q, k, v)]
            if kind == "fast":
                attend = choose_attention(q=torch.arange(T, device=device), T_k=T, B=B, config=config, dtype=dtype,
                                          **arguments)
                y = attend(*inputs)
            else:
                att = inputs[0] @ inputs[1].mT * D ** -0.5
                y = att.masked_fill(~allowed[:, None], -torch.inf).softmax(-1) @ inputs[2]
            y.backward(out_grad.to(y.dtype))
            results.append([y.detach(), *(t.grad for t in inputs)])
        for fast, dense in zip(*results):
            error = float((fast.double() - dense).norm() / dense.norm())
            assert error < (1e-5 if dtype == torch.float32 else 2e-2), error


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_on_the_gpu_computes_what_it_does_on_the_cpu(device):
    net = randomized(n_embd=64)
    x = torch.randint(0, 256, (4, 48), generator=make_rng("ids"))
    with torch.no_grad():
        want = net(x, 7)
        got = net.to(device)(x.to(device), 7)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-3)


# ---- experiments.gpu_check

def test_the_gpu_check_reports_failures_and_continues_where_it_stopped(tmp_path, monkeypatch, capsys):
    steps = [gpu_check.Step("good", ["-c", "print('fine')"]), gpu_check.Step("bad", ["-c", "1 / 0"]),
             gpu_check.Step("slow", ["-c", "import time; print('begun', flush=True); time.sleep(60)"])]
    monkeypatch.setattr(gpu_check, "list_steps", lambda flags: steps)
    out = ["--device", "cpu", "--out_dir", str(tmp_path)]
    assert gpu_check.main([*out, "--minutes", ".05"]) == 1
    report = (tmp_path / "report.txt").read_text()
    assert "1. good: passed" in report and "2. bad: FAILED with exit code 1" in report
    assert "ZeroDivisionError" in report and "3. slow: stopped: out of time" in report and "begun" in report
    steps[2].words[1] = "print('done')"         # another command, another file
    gpu_check.main(out)
    report = (tmp_path / "report.txt").read_text()
    assert "2. bad: FAILED with exit code 1" in report and "3. slow: passed" in report
    assert capsys.readouterr().out.count("in an earlier call") == 2


def test_every_step_of_the_gpu_check_has_flags_that_its_program_knows(monkeypatch):
    """Each command is parsed as its program would parse it."""
    text = gpu_check.__file__
    flags = argparse.Namespace(out_dir="out", device="cpu", small=True, nanogpt="", data=text)
    for step in gpu_check.list_steps(flags):
        if step.words[1] == "experiments.bench":
            bench_flags, rest = parse_with_train_flags("bench", "", bench.FLAGS, bench.RESERVED, step.words[2:])
            get_config(["--objective", bench_flags.objectives.split(",")[0], *rest])
        elif step.words[1] == "experiments.compare":
            compare_flags, rest = parse_with_train_flags("compare", "", compare.FLAGS, compare.RESERVED,
                                                         step.words[2:])
            assert compare.plan_cells(compare_flags, rest)
