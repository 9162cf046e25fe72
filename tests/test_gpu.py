"""Tests for a GPU. Those that make sense on a CPU run there, too."""
import pytest
import torch
from conftest import NEEDS_CUDA, randomized

from data import make_rng
from experiments import gpu_check
from model import ModelConfig, choose_attention, dense_mask

H = 2
T = 161                                         # odd: not a multiple of a kernel's tiles


def rule_arguments(rule, B, device):  # -> arguments of choose_attention
    g = make_rng("rule")
    prefix = torch.randint(0, T, (B,), generator=g).to(device)
    mask = (torch.rand(B, T, T, generator=g) < 0.5).to(device) | torch.eye(T, dtype=torch.bool, device=device)
    rules = {"each row": dict(prefix=prefix), "mask": dict(prefix=0, mask=mask)}
    return rules.get(rule, dict(prefix=rule))


@pytest.mark.parametrize("D", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("rule", [0, 50, T, "each row", "mask"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_fast_attention_equals_a_dense_mask_forward_and_backward(device, rule, D):
    """In float32, and on a GPU also in bfloat16, with a larger tolerance."""
    B = 64 if device == "cuda" else 2
    q = torch.arange(T, device=device)
    how = rule_arguments(rule, B, device)
    allowed = how["mask"] if rule == "mask" else dense_mask(how["prefix"], q, T)
    tolerances = {torch.float32: 1e-5}
    if device == "cuda":
        tolerances[torch.bfloat16] = 2e-2
    for dtype, tolerance in tolerances.items():
        g = make_rng("attention", device)
        *qkv, out_grad = torch.randn(B, T, 4, H, D, generator=g, device=device).to(dtype).permute(2, 0, 3, 1, 4)
        fast = [t.detach().requires_grad_() for t in qkv]           # not contiguous, as in a block
        y = choose_attention(q_pos=q, T_k=T, config=ModelConfig(1, H, H * D), dtype=dtype, **how)(*fast)
        y.backward(out_grad)
        dense = [t.double().requires_grad_() for t in qkv]
        att = dense[0] @ dense[1].mT * D ** -0.5
        want = att.masked_fill(~allowed[:, None], -torch.inf).softmax(-1) @ dense[2]
        want.backward(out_grad.double())
        for a, b in zip([y.detach(), *(t.grad for t in fast)], [want.detach(), *(t.grad for t in dense)]):
            assert float((a.double() - b).norm() / b.norm()) < tolerance


@NEEDS_CUDA
def test_a_model_computes_the_same_on_the_gpu_and_on_the_cpu():
    net = randomized(n_embd=64)
    x = torch.randint(0, 256, (4, 48), generator=make_rng("ids"))
    want = [net(x, prefix) for prefix in (0, 7, 48)]
    have = [net.cuda()(x.cuda(), prefix).cpu() for prefix in (0, 7, 48)]
    torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-3)


# ---- experiments.gpu_check
@pytest.mark.slow
def test_the_gpu_check_reports_failures_and_can_be_continued(tmp_path, monkeypatch, capsys):
    steps = [gpu_check.Step("good", ["-c", "print('fine')"]), gpu_check.Step("bad", ["-c", "1 / 0"]),
             gpu_check.Step("slow", ["-c", "import time; print('begun', flush=True); time.sleep(60)"])]
    monkeypatch.setattr(gpu_check, "list_steps", lambda flags: steps)
    out = ["--device", "cpu", "--out_dir", str(tmp_path)]
    assert gpu_check.main([*out, "--minutes", ".05"]) == 1
    report = (tmp_path / "report.txt").read_text()
    assert "1. good: passed" in report and "2. bad: FAILED with exit code 1" in report
    assert "ZeroDivisionError" in report and "3. slow: stopped: out of time" in report and "begun" in report
    steps[2].words[1] = "print('done')"         # another command is run again
    gpu_check.main(out)
    report = (tmp_path / "report.txt").read_text()
    assert "2. bad: FAILED with exit code 1" in report and "3. slow: passed" in report
    assert capsys.readouterr().out.count("in an earlier call") == 2
