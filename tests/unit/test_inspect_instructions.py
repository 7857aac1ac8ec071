"""Counting instructions in PTX: classes and widths, and everything that is no instruction."""

from __future__ import annotations

import pytest

from kbench.inspect.instructions import GROUPS, group_of, instruction_mix

PTX = """
.version 9.0
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 shared[];

.func helper() { fma.rn.f64 %fd1, %fd2, %fd3, %fd4; ret; }

.visible .entry first(
    .param .u64 first_param_0 // ld.global.f32 in a comment
)
.maxntid 256, 1, 1
{
    .reg .pred %p<2>;
    .reg .b32 %r<9>;
    .loc 1 265 0
    ld.param.u64 %rd1, [first_param_0];
    cvta.to.global.u64 %rd2, %rd1;
    .loc 2 16 35, function_name $L__info_string0, inlined_at 1 269 5
$L__BB0_1:
    /* st.global.f32 [%rd2], %f1;
    */
    ld.global.nc.L1::no_allocate.v4.f32 {%f1, %f2, %f3, %f4}, [%rd2];
    @%p1 bra $L__BB0_1;
    // begin inline asm
    { .reg .b16 t; mul.bf16 t, %h1, %h2; fma.rn.bf16x2 %r1, %r2, %r3, %r4; }
    // end inline asm
    @!%p1 st.shared.v2.b16 [%r1], {%h1, %h2};
    { // callseq 0, 0
    call.uni helper, ();
    }
    ret;
}
.entry second()
{
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
        {%f1, %f2, %f3, %f4},
        {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f1, %f2, %f3, %f4};
    exit;
}
.section .debug_str { $L__info_string0: .b8 95 }
"""


def test_kernels_are_counted_apart_and_only_their_instructions() -> None:
    assert instruction_mix(PTX) == {
        "first": {
            "global loads, 128 bits": 1,
            "shared stores, 32 bits": 1,
            "parameter loads, 64 bits": 1,
            "fp16 and bf16 multiply-adds": 1,
            "fp16 and bf16 other": 1,
            "branches": 1,
            "calls": 1,
            "moves": 1,
            "other": 1,
        },
        "second": {"tensor core": 1, "other": 1},
    }


def test_text_without_kernels_has_none() -> None:
    assert instruction_mix("") == {} and instruction_mix(".version 9.0\n") == {}
    assert instruction_mix(".visible .entry cut_short(") == {"cut_short": {}}


CLASSES = [
    ("ld.global.f32 %f1, [%rd1]", "global loads, 32 bits"),
    ("ld.volatile.global.u8 %r1, [%rd1]", "global loads, 8 bits"),
    ("ld.relaxed.gpu.global.v2.u64 {%rd1, %rd2}, [%rd3]", "global loads, 128 bits"),
    ("ld.global.L2::128B.v8.b32 {%r1}, [%rd3]", "global loads, 256 bits"),
    ("ld.f32 %f1, [%rd1]", "generic loads, 32 bits"),
    ("ld.shared::cta.b16 %h1, [%r1]", "shared loads, 16 bits"),
    ("ld.local.b64 %rd1, [%r1]", "local loads, 64 bits"),
    ("ld.const.f32 %f1, [c]", "constant loads, 32 bits"),
    ("st.global.cs.v4.s32 [%rd1], {%r1, %r2, %r3, %r4}", "global stores, 128 bits"),
    ("st.param.b64 [p], %rd1", "parameter stores, 64 bits"),
    ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1}, [%r2]", "matrix loads and stores"),
    ("wmma.load.a.sync.aligned.m16n16k16.row.f16 {%r1}, [%rd1], 16", "matrix loads and stores"),
    ("wmma.mma.sync.aligned.m16n16k16.row.col.f32.f32 {%f1}, {%r1}", "tensor core"),
    ("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1", "tensor core"),
    ("cp.async.cg.shared.global [%r1], [%rd1], 16", "async copies"),
    ("cp.async.bulk.commit_group", "waits for async copies"),
    ("cp.async.wait_group 1", "waits for async copies"),
    ("prefetch.global.L2 [%rd1]", "prefetches"),
    ("atom.global.add.f32 %f1, [%rd1], %f2", "global atomics"),
    ("red.shared.add.u32 [%r1], 1", "shared atomics"),
    ("atom.add.noftz.bf16x2 %r1, [%rd1], %r2", "generic atomics"),
    ("shfl.sync.bfly.b32 %r1|%p1, %r2, 16, 31, -1", "shuffles"),
    ("redux.sync.add.s32 %r1, %r2, -1", "votes and warp reductions"),
    ("bar.sync 0", "block barriers"),
    ("barrier.cluster.arrive", "block barriers"),
    ("bar.warp.sync -1", "warp barriers"),
    ("mbarrier.init.shared.b64 [%r1], 1", "memory barriers"),
    ("membar.gl", "fences"),
    ("fma.rn.f32 %f1, %f2, %f3, %f4", "fp32 multiply-adds"),
    ("fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4", "fp32 multiply-adds"),
    ("max.ftz.f32 %f1, %f2, %f3", "fp32 other"),
    ("add.f64 %fd1, %fd2, %fd3", "fp64"),
    ("mad.lo.s32 %r1, %r2, %r3, %r4", "integer"),
    ("xor.b32 %r1, %r2, %r3", "integer"),
    ("and.pred %p1, %p2, %p3", "comparisons and selections"),
    ("selp.f32 %f1, %f2, %f3, %p1", "comparisons and selections"),
    ("rem.u64 %rd1, %rd2, %rd3", "integer divisions"),
    ("div.rn.f32 %f1, %f2, %f3", "special functions"),
    ("ex2.approx.ftz.f32 %f1, %f2", "special functions"),
    ("rsqrt.approx.f32 %f1, %f2", "special functions"),
    ("cvt.rn.bf16x2.f32 %r1, %f1, %f2", "conversions"),
    ("mov.b32 {%h1, %h2}, %r1", "moves"),
    ("bra.uni $L__BB0_1", "branches"),
    ("trap", "other"),
    ("never.heard.of %r1", "other"),
]


@pytest.mark.parametrize(("line", "expected"), CLASSES, ids=[line.split()[0] for line, _ in CLASSES])
def test_classes(line: str, expected: str) -> None:
    assert instruction_mix(f".entry k()\n{{\n    {line};\n}}\n") == {"k": {expected: 1}}
    assert group_of(expected) in GROUPS


def test_classes_come_in_order_and_wide_accesses_first() -> None:
    body = "add.s32 %r1, %r1, 1; ld.global.f32 %f1, [%rd1]; ld.global.v4.f32 {%f1}, [%rd1]; ld.global.f32 %f1, [%rd1];"
    (mix,) = instruction_mix(f".entry k() {{ {body} }}").values()
    assert list(mix.items()) == [("global loads, 128 bits", 1), ("global loads, 32 bits", 2), ("integer", 1)]
