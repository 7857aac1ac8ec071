"""The proof: launches from poisoned memory, redzones, inputs, schedules, aliases, determinism, on a fake device."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest

from check_fakes import COUNT, OUTSIDE, PLAN, PROBLEM, FakeDevice, double, doubling_family, inside
from kbench.check.buffers import Buffers
from kbench.check.case import make_case
from kbench.check.memory import memory_needed, require_memory
from kbench.check.prove import prove, recheck
from kbench.check.verdict import Finding, OutputVerdict, Verdict
from kbench.errors import CannotRunError, KbenchError, KernelFault
from kbench.family import Launch, Problem, Tensor


class Proof:
    """Everything that prove needs, around one kernel function."""

    def __init__(self, kernel, device=None, plan=PLAN, **version):
        self.device = device or FakeDevice()
        self.family = doubling_family(plan, **version)
        self.version = self.family.versions[0]
        self.prepared = self.device.prepare(plan, {"double": kernel}, self.family.tensors(PROBLEM))
        self.plan = plan
        self.launched = 0

    def buffers(self):
        return Buffers(self.device, self.family, self.version, PROBLEM, 128, self.plan)

    def prove(self, seed=1, **options):
        case = make_case(self.family, PROBLEM, seed)
        with self.buffers() as buffers:
            return prove(self.device, self.family, self.version, self.prepared, buffers, case, **options)


def wrapped(after):
    """The right kernel, and then `after(schedule, out, ids, state, inp, tags)`."""

    def kernel(*arguments):
        double(*arguments)
        after(*arguments)

    return kernel


def test_a_right_kernel_passes_with_all_evidence():
    proof = Proof(double)
    verdict = proof.prove()
    assert verdict.passed and verdict.reason() == "" and verdict.details() == []
    assert [output.name for output in verdict.outputs] == ["state", "out", "ids"]
    assert verdict.deterministic is True and verdict.launches == 2 and verdict.judge == "numpy"
    data = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))
    assert data["outputs"][1] == {"name": "out", "compared": COUNT, "wrong": 0, "used": data["outputs"][1]["used"]}
    assert proof.device.live == 0


def test_every_schedule_runs_and_at_least_as_many_launches_as_asked():
    seen = []
    proof = Proof(wrapped(lambda schedule, *rest: seen.append(schedule)), FakeDevice(("a", "b", "c")))
    assert proof.prove(repeats=5).launches == 5 and seen == ["a", "b", "c", "a", "b"]
    seen.clear()
    assert Proof(wrapped(lambda s, *rest: seen.append(s)), FakeDevice(("",))).prove(repeats=3).launches == 3


def test_each_launch_is_announced():
    calls = []
    Proof(double).prove(repeats=4, guard=lambda: contextlib.nullcontext(calls.append(1)))
    assert len(calls) == 4


def test_outputs_start_as_nan_and_then_as_something_else():
    seen = []

    def kernel(schedule, out, *rest):
        seen.append(inside(out, COUNT).view(np.uint32)[0])
        double(schedule, out, *rest)

    assert Proof(kernel).prove().passed
    assert seen == [0xFFFFFFFF, 0x46464646]


def test_a_kernel_that_does_nothing_leaves_everything_unwritten():
    verdict = Proof(lambda *arguments: None).prove()
    out = next(output for output in verdict.outputs if output.name == "out")
    assert (out.kind, out.wrong) == ("unwritten", COUNT)
    assert not verdict.passed and "initialised" not in " ".join(verdict.details())


def test_nans_that_look_like_poison_are_told_from_unwritten_elements():
    def kernel(schedule, out, *rest):
        double(schedule, out, *rest)
        inside(out, COUNT).view(np.uint32)[4] = 0xFFFFFFFF

    verdict = Proof(kernel).prove()
    assert "out: 1 of 300 elements wrong (nan)" in verdict.reason()


def test_a_start_value_is_restored_before_each_launch():
    verdict = Proof(double).prove(repeats=3)
    assert next(output for output in verdict.outputs if output.name == "state").passed


def test_a_write_past_the_end_is_a_finding_though_the_outputs_are_right():
    verdict = Proof(wrapped(lambda s, out, *rest: out.__setitem__(OUTSIDE + COUNT, 1.0))).prove()
    assert verdict.reason() == "writes outside out: 4 bytes changed right past the end of it"
    assert "as if element 300 of 300 elements in memory had been written" in verdict.details()


def test_a_write_before_the_start_is_a_finding():
    verdict = Proof(wrapped(lambda s, out, ids, *rest: ids.__setitem__(OUTSIDE - 2, 1))).prove()
    assert verdict.reason() == "writes outside ids: 4 bytes changed 8 bytes before the start of it"


def test_a_changed_input_is_a_finding_even_where_its_new_value_is_nan():
    def spoil(schedule, out, ids, state, inp, tags):
        inside(inp, COUNT)[[7, 9]] = np.nan

    verdict = Proof(wrapped(spoil)).prove()
    assert verdict.reason().startswith("changes its input inp: 2 of 300 elements, first at [n=7]: was ")
    assert verdict.reason().endswith("is nan")
    assert all(output.passed for output in verdict.outputs)  # each launch got its inputs anew


def test_wrong_in_one_order_only_is_a_race():
    def racing(schedule, out, *rest):
        double(schedule, out, *rest)
        if schedule == "reverse":
            inside(out, COUNT)[3] += 1

    verdict = Proof(racing).prove()
    assert "only with threads in reverse order: a missing barrier or a race" in verdict.reason()
    assert "out: 1 of 300 elements wrong" in verdict.reason() and "in 3 of 6 launches" in verdict.reason()


def test_wrong_with_one_poison_only_is_memory_read_before_it_is_written():
    def reading(schedule, out, *rest):
        before = inside(out, COUNT).copy()
        double(schedule, out, *rest)
        inside(out, COUNT)[:] = np.fmax(inside(out, COUNT), before)

    verdict = Proof(reading).prove()
    assert "only where memory held bytes 0x46: it reads what it has not written" in verdict.reason()


def test_wrong_from_some_launch_on_is_kept_state():
    class Expiring(Proof):
        def kernel(self, schedule, out, *rest):
            self.launched += 1
            double(schedule, out, *rest)
            if self.launched > 1:
                inside(out, COUNT)[0] = 0

        def __init__(self):
            super().__init__(self.kernel)

    verdict = Expiring().prove()
    assert "all but the first: it keeps something between launches" in verdict.reason()


def test_wrong_now_and_then_says_how_often():
    flips = iter([1, 0, 0, 1, 1, 0])

    def flaky(schedule, out, *rest):
        double(schedule, out, *rest)
        inside(out, COUNT)[0] += next(flips)

    assert "in 3 of 6 launches: a race" in Proof(flaky).prove().reason()


def test_uninitialised_scratch_is_suspected_where_wrong_values_change():
    def adding(schedule, out, *rest):
        before = inside(out, COUNT).copy()
        double(schedule, out, *rest)
        inside(out, COUNT)[:] += before

    verdict = Proof(adding).prove()
    assert not verdict.passed and "differ from launch to launch: memory that was not initialised" in verdict.reason()


def nudging(schedule, out, *rest):
    """Right to the last bit in one order, within the bound and different in the other."""
    double(schedule, out, *rest)
    if schedule == "reverse":
        inside(out, COUNT).view(np.uint32)[5] ^= 1


def test_determinism_is_seen_and_only_a_broken_claim_fails():
    claimed = Proof(nudging)
    unclaimed = Proof(nudging, claims_deterministic=False)
    for proof in (claimed, unclaimed):
        reference = proof.family.reference

        def loose(*arguments, reference=reference):
            answers = reference(*arguments)
            answers["out"].bound = 1e-3
            return answers

        object.__setattr__(proof.family, "reference", loose)
    verdict = unclaimed.prove()
    assert verdict.passed and verdict.deterministic is False
    verdict = claimed.prove()
    assert verdict.reason() == "claims to be deterministic, but 1 elements of out differ between launches"


def test_elements_that_may_hold_anything_do_not_count_as_nondeterminism():
    def skipping(schedule, out, *rest):
        start = inside(out, COUNT)[:10].copy()
        double(schedule, out, *rest)
        inside(out, COUNT)[:10] = start  # left as they were: other poison in each launch

    proof = Proof(skipping)
    assert not proof.prove().passed
    tensors = proof.family.tensors

    def masked(problem):
        found = list(tensors(problem))
        found[3] = Tensor("out", (COUNT,), "fp32", "out", ("n",), unspecified=lambda xp: xp.arange(COUNT) < 10)
        return tuple(found)

    object.__setattr__(proof.family, "tensors", masked)
    verdict = proof.prove()
    assert verdict.passed and verdict.deterministic is True
    assert next(output for output in verdict.outputs if output.name == "out").compared == COUNT - 10


# ---------------------------------------------------------------------------------------------- aliases


def test_an_alias_is_checked_as_well():
    seen = []

    def watching(schedule, out, ids, state, inp, tags):
        seen.append(out.ctypes.data == inp.ctypes.data)
        double(schedule, out, ids, state, inp.copy(), tags)

    verdict = Proof(watching, aliases=(("inp", "out"),)).prove()
    # The state is computed from a private copy of inp, so this kernel is right in place too.
    assert verdict.passed and verdict.launches == 4 and seen == [False, False, True, True]


def test_a_version_that_is_wrong_in_place_fails_and_says_so():
    verdict = Proof(double, aliases=(("inp", "out"),)).prove()
    assert not verdict.passed  # `state` is computed from inp after out has overwritten it
    assert "state: " in verdict.reason()
    assert "only where out is the same memory as inp, which the version allows" in verdict.reason()


def test_an_alias_of_unlike_tensors_is_a_fault_of_the_version():
    for pair in (("inp", "state"), ("inp", "ids")):
        with pytest.raises(KbenchError, match="cannot be the same memory"):
            Proof(double, aliases=(pair,)).prove()


# ---------------------------------------------------------------------------------------------- faults


def failing_with(kind, **where):
    def kernel(*arguments):
        raise KernelFault(kind, "writes past the end of out", **where)

    return kernel


def test_a_fault_of_a_wrong_kernel_is_a_finding_with_its_place():
    proof = Proof(failing_with("out-of-bounds", kernel="k<3>", block=(1, 0, 0), thread=(2, 0, 0), location="a.cu:9"))
    verdict = proof.prove()
    assert verdict.reason() == "writes past the end of out" and verdict.outputs == () and verdict.launches == 1
    assert verdict.details() == ["kernel k<3>, block (1, 0, 0), thread (2, 0, 0), at a.cu:9"]
    assert verdict.deterministic is None and proof.device.live == 0


@pytest.mark.parametrize("kind", ["assert", "timeout", "deadlock", "died"])
def test_a_crash_or_a_hang_is_raised_and_nothing_stays_allocated(kind):
    proof = Proof(failing_with(kind))
    with pytest.raises(KernelFault):
        proof.prove()
    assert proof.device.live == 0


def test_a_lost_context_is_raised_whatever_the_fault():
    with pytest.raises(KernelFault):
        Proof(failing_with("misaligned", context_lost=True)).prove()


# ---------------------------------------------------------------------------------------------- after the timing


def test_a_replayed_result_is_stale_on_other_inputs():
    kept = {}

    def replaying(schedule, out, ids, state, inp, tags):
        double(schedule, out, ids, state, inp, tags)
        inside(out, COUNT)[:] = kept.setdefault("out", inside(out, COUNT).copy())

    proof = Proof(replaying)
    first, other = (make_case(proof.family, PROBLEM, seed) for seed in (1, 2))
    with proof.buffers() as buffers:
        subject = (proof.device, proof.family, proof.version, proof.prepared, buffers)
        assert prove(*subject, first).passed
        verdict = recheck(*subject, other)
        assert recheck(*subject, first).passed
    out = next(output for output in verdict.outputs if output.name == "out")
    assert out.kind == "stale" and "out: 300 of 300 elements wrong (stale)" in verdict.reason()
    assert verdict.launches == 1 and verdict.deterministic is None


def test_restore_brings_back_the_start_values_alone():
    proof = Proof(double)
    case = make_case(proof.family, PROBLEM, 1)
    with proof.buffers() as buffers:
        buffers.reset(case, 0xFF)
        proof.device.enqueue(buffers.bind(proof.prepared))
        out = buffers.by_name["out"].array.copy()
        assert not np.array_equal(buffers.by_name["state"].array, case.inputs["state"])
        buffers.restore()
        assert np.array_equal(buffers.by_name["state"].array, case.inputs["state"])
        assert np.array_equal(buffers.by_name["out"].array, out)


# ---------------------------------------------------------------------------------------------- plans and memory


def test_only_touched_tensors_are_allocated():
    with Proof(double).buffers() as buffers:
        assert list(buffers.by_name) == ["inp", "tags", "state", "out", "ids"]


def test_a_plan_that_leaves_a_required_output_alone_is_refused():
    plan = (Launch("double", (1,), (32,), ("out", "state", "inp")),)
    with pytest.raises(KbenchError, match="doubling version 1, block 128: the plan never touches the output ids"):
        Proof(double, plan=plan).buffers()


def test_a_plan_that_names_an_unknown_tensor_is_refused():
    plan = (Launch("double", (1,), (32,), ("out", "ids", "state", "inpt", "tags")),)
    with pytest.raises(KbenchError, match="names a tensor 'inpt'; there are inp, tags"):
        Proof(double, plan=plan).buffers()


@pytest.mark.parametrize("own", [Tensor("out", (4,), "fp32", "scratch"), Tensor("mine", (4,), "fp32", "out")])
def test_scratch_must_be_scratch_of_its_own_name(own):
    with pytest.raises(KbenchError, match=f"scratch {own.name} must have"):
        Proof(double, scratch=lambda problem, block, props: (own,)).buffers()


def test_buffers_are_freed_when_an_allocation_fails(monkeypatch):
    proof = Proof(double)
    alloc = proof.device.alloc

    def short(tensor):
        if tensor.name == "ids":
            raise CannotRunError("out of memory")
        return alloc(tensor)

    monkeypatch.setattr(proof.device, "alloc", short)
    with pytest.raises(CannotRunError), proof.buffers():
        pass
    assert proof.device.live == 0


def test_memory_is_counted_without_being_allocated():
    huge = Problem({"N": 10**12}, "fp32")
    needed = memory_needed(doubling_family(PLAN).tensors(huge))
    # Six buffers of 4 bytes an element, twice three inputs and four outputs kept; then the case in float64.
    assert needed.device >= 10**12 * 4 * (6 + 6 + 4) and needed.device < 10**12 * 4 * 17
    assert needed.host >= 10**12 * (3 * 12 + 4 * 17)


def test_too_large_a_problem_is_refused_with_both_figures():
    proof = Proof(double, FakeDevice(free=1 << 30))
    problem = Problem({"N": 10**9}, "fp32")
    with pytest.raises(CannotRunError) as caught:
        require_memory(proof.device, proof.family, proof.version, problem, proof.family.tensors(problem))
    text = str(caught.value)
    assert text.startswith("doubling version 1 at N=1000000000 needs ") and "1.0 GiB are free" in text
    assert "try smaller sizes: --preset small (N=300)" in text
    require_memory(proof.device, proof.family, proof.version, PROBLEM, proof.family.tensors(PROBLEM))


# ---------------------------------------------------------------------------------------------- verdicts


def test_a_verdict_names_what_explains_the_rest_first():
    wrong = OutputVerdict("out", 10, 10, 3, None)
    findings = (Finding("determinism", "d"), Finding("input", "i"), Finding("redzone", "r"))
    assert Verdict((wrong,), findings).reason() == "r"
    assert Verdict((wrong,), findings[:2]).reason() == "i"
    assert Verdict((wrong,), findings[:1]).reason() == "out: 3 of 10 elements wrong"
    assert "out: 3 of 10 elements wrong" in Verdict((wrong,), findings).details()
    assert not Verdict((), findings[:1]).passed


class SharingDevice(FakeDevice):
    """Another GPU has the second half of `out`: it is poisoned, computed and fetched with the first half."""

    def __init__(self):
        super().__init__(("",))
        self.log, self.far = [], np.zeros(COUNT // 2, np.float32)
        self.computes = True

    def distribute(self, bound):
        self.log.append("distribute")
        self.far[:] = bound.native["out"].array[COUNT // 2 :]

    def enqueue(self, bound, stream=None, schedule=""):
        self.log.append("enqueue")
        super().enqueue(bound, stream, schedule)
        if self.computes:
            self.far[:] = bound.native["out"].array[COUNT // 2 :]

    def collect(self, bound):
        self.log.append("collect")
        bound.native["out"].array[COUNT // 2 :] = self.far


def test_what_other_gpus_compute_is_judged_too():
    proof = Proof(double, SharingDevice())
    assert proof.prove().passed
    assert proof.device.log == ["distribute", "enqueue", "collect"] * 2
    proof.device.computes = False
    verdict = proof.prove()
    (out,) = [output for output in verdict.outputs if output.name == "out"]
    assert not out.passed and out.kind == "unwritten" and out.wrong == COUNT // 2


def test_a_fault_on_another_gpu_that_only_a_wrong_kernel_has_is_a_finding():
    proof = Proof(double, SharingDevice())

    def fault(bound):
        raise KernelFault("out-of-bounds", "rank 1: writes outside its row")

    proof.device.collect = fault
    verdict = proof.prove()
    assert not verdict.passed and "rank 1: writes outside its row" in verdict.reason()
