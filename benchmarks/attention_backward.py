"""attention_backward beside PyTorch: the same mathematics, inputs and outputs, in one run on one GPU.

    python3 benchmarks/attention_backward.py [--json FILE]

PyTorch computes dinp from dout, q, k, v and the attention matrix, as the family's contract says: permute,
four batched matrix products in TF32, softmax backward, permute; once eagerly and once through torch.compile.
Its times are medians of triton.testing.do_bench, which also flushes the L2 cache before each launch. kbench's
are the rows of `kbench sweep attention_backward --versions 7-8 --dtype tf32`, through the same code. The
claim is the ratio.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

SIZES = {"B": 4, "T": 1024, "C": 768, "NH": 12}  # the family's default preset


def kbench_rows() -> list[dict]:
    from kbench.grammar import Target
    from kbench.selection import Selection
    from kbench.sweep import Bench, Options

    with Bench(Options(device="cuda"), lambda line: print(line, file=sys.stderr)) as bench:
        target = Target("attention_backward", (7, 8))
        return [row.to_dict() for row in bench.rows(bench.jobs(Selection([target], "sweep", dtype="tf32")))]


def torch_times() -> dict[str, float]:
    import torch
    from triton.testing import do_bench

    torch.backends.cuda.matmul.allow_tf32 = True
    b, t, c, nh = (SIZES[name] for name in ("B", "T", "C", "NH"))
    hs = c // nh
    scale = 1.0 / math.sqrt(hs)
    q, k, v = (torch.randn(b * nh, t, hs, device="cuda") for _ in range(3))
    scores = (q @ k.transpose(1, 2)).mul_(scale)
    scores.masked_fill_(torch.ones(t, t, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
    att = torch.softmax(scores, dim=-1)
    del scores
    dout = torch.randn(b, t, c, device="cuda")

    def backward(dout: Any, q: Any, k: Any, v: Any, att: Any) -> Any:
        dy = dout.view(b, t, nh, hs).transpose(1, 2).reshape(b * nh, t, hs)
        datt = torch.bmm(dy, v.transpose(1, 2))
        dv = torch.bmm(att.transpose(1, 2), dy)
        dpreatt = torch._softmax_backward_data(datt, att, -1, torch.float32) * scale
        dq, dk = torch.bmm(dpreatt, k), torch.bmm(dpreatt.transpose(1, 2), q)
        heads = (x.view(b, nh, t, hs).transpose(1, 2).reshape(b, t, c) for x in (dq, dk, dv))
        return torch.cat(tuple(heads), dim=-1)

    compiled = torch.compile(backward)
    arguments = (dout, q, k, v, att)
    worst = (backward(*arguments) - compiled(*arguments)).abs().max().item()
    if not worst < 1e-2:
        raise SystemExit(f"PyTorch's two ways disagree by {worst:g}: there is no anchor to compare with")
    return {
        "PyTorch eager": do_bench(lambda: backward(*arguments), return_mode="median"),
        "torch.compile": do_bench(lambda: compiled(*arguments), return_mode="median"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        raise SystemExit("this benchmark needs PyTorch and Triton: pip install torch") from None
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    ours = {}
    for row in kbench_rows():
        if row["measurement"] is not None:
            name = f"kbench version {row['version']} @{row['block']}"
            ours[name] = row["measurement"]["median_ms"]
        else:
            print(f"version {row['version']} @{row['block']}: {row['status']}: {row['reason']}", file=sys.stderr)
    anchors = torch_times()
    times = anchors | dict(sorted(ours.items(), key=lambda item: item[1]))
    base = anchors["torch.compile"]
    print(f"attention_backward {SIZES}, tf32, cold L2, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, time_ms in times.items():
        print(f"{name:24s} {time_ms:8.4f} ms   {base / time_ms:5.2f} x torch.compile")
    if options.json:
        options.json.write_text(json.dumps({"sizes": SIZES, "median_ms": times}, indent=1))


if __name__ == "__main__":
    main()
