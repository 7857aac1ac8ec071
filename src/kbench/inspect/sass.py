"""The instructions of a kernel by class, counted in its machine code: the classes are those of `instructions.py`.

As there, a static count. Unlike PTX, this is what runs: registers are allocated (local loads and stores are spills, or
arrays that are indexed at run time), addresses are computed, and wide accesses have been merged.
Opcodes: the instruction set reference in the manual of CUDA's binary utilities; what no class names counts as other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kbench.inspect.instructions import in_order

_SPACES = {
    "LDG": "global loads", "STG": "global stores", "LDS": "shared loads", "STS": "shared stores",
    "LD": "generic loads", "ST": "generic stores", "LDL": "local loads", "STL": "local stores",
    "LDC": "constant loads", "LDCU": "constant loads", "ULDC": "constant loads",
}  # fmt: skip
_CLASSES = {
    "matrix loads and stores": "LDSM STSM MOVM LDTM STTM LDT STT",
    "async copies": "LDGSTS UBLKCP UBLKRED UTMALDG UTMASTG UTMAREDG UTMACMDFLUSH",
    "waits for async copies": "LDGDEPBAR DEPBAR ARRIVES UTMACCTL",
    "prefetches": "CCTL CCTLL CCTLT UBLKPF UTMAPF",
    "global atomics": "ATOMG RED REDG REDAS",
    "shared atomics": "ATOMS",
    "generic atomics": "ATOM",
    "shuffles": "SHFL",
    "votes and warp reductions": "VOTE VOTEU MATCH REDUX CREDUX ELECT",
    "block barriers": "BAR B2R UCGABAR_ARV UCGABAR_WAIT",
    "warp barriers": "WARPSYNC",
    "memory barriers": "SYNCS",
    "fences": "MEMBAR ERRBAR CGAERRBAR FENCE",
    "tensor core": "HMMA IMMA DMMA BMMA QMMA OMMA HGMMA IGMMA BGMMA QGMMA UTCHMMA UTCIMMA UTCQMMA UTCOMMA WARPGROUP",
    "fp32 multiply-adds": "FFMA FFMA32I FFMA2",
    "fp32 other": "FADD FADD2 FADD32I FMUL FMUL2 FMUL32I FMNMX FMNMX3 FCHK FSWZADD",
    "fp16 and bf16 multiply-adds": "HFMA2 HFMA2_32I",
    "fp16 and bf16 other": "HADD2 HADD2_32I HMUL2 HMUL2_32I HMNMX2",
    "fp64": "DADD DFMA DMUL DSETP",
    "special functions": "MUFU",
    "conversions": "F2F F2FP F2I F2IP I2F I2FP I2I I2IP FRND UF2FP UI2F UI2FP UF2I",
    "integer": "BMSK BREV FLO IABS IADD IADD3 IADD32I IDP IDP4A IMAD IMNMX IMUL IMUL32I ISCADD LEA LOP LOP3 LOP32I "
    "POPC SGXT SHF SHL SHR VABSDIFF VABSDIFF4 VADD VIADD VIADDMNMX VIMNMX VIMNMX3 XMAD R2B "
    "UBMSK UBREV UFLO UIADD3 UIMAD UIMNMX UISCADD ULEA ULOP ULOP3 ULOP32I UPOPC USGXT USHF USHL USHR UIABS UVIADD "
    "UVIMNMX UVIADDMNMX",
    "comparisons and selections": "ISETP FSETP HSETP2 FSET HSET2 FSEL SEL PSETP PLOP3 ICMP FCMP UISETP UPLOP3 UPSETP "
    "USEL UFSETP UFSEL R2P P2R UP2UR UR2UP",
    "branches": "BRA BRX BRXU JMP JMX JMXU BRA_IMM",
    "convergence": "BSSY BSYNC BREAK BMOV YIELD RPCMOV ENDCOLLECTIVE",
    "calls": "CALL RET JCAL",
    "moves": "MOV MOV32I UMOV PRMT UPRMT S2R S2UR CS2R CS2UR R2UR LEPC GETLMEMBASE SETLMEMBASE MOVSCALE",
    "other": "EXIT NOP KILL BPT NANOSLEEP PMTRIG ACQBULK ACQSHMINIT PREEXIT USETMAXREG",
}
_CLASS = {name: group for group, names in _CLASSES.items() for name in names.split()}
_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
_WORD = 32  # bits: what an access moves whose opcode says no width


def sass_mix(instructions: Iterable[str]) -> dict[str, int]:
    """Class to count, in the order of `instructions.GROUPS`, of instructions such as `LDG.E.128 R4, [R2.64]`."""
    return in_order(Counter(map(_class, instructions)))


def _class(instruction: str) -> str:
    opcode, _, operands = instruction.partition(" ")
    name, *modifiers = opcode.split(".")
    if name in _SPACES:
        width = next((_WIDTHS[part] for part in modifiers if part in _WIDTHS), _WORD)
        return f"{_SPACES[name]}, {width} bits"
    if _is_move(name, modifiers, operands):
        return "moves"
    return _CLASS.get(name, "other")


def _is_move(name: str, modifiers: list[str], operands: str) -> bool:
    """Whether arithmetic only copies: a multiplication by the register that is always zero."""
    if name == "IMAD" and "MOV" in modifiers:
        return True
    factors = [operand.strip().lstrip("-") for operand in operands.split(",")[1:3]]
    return name in ("IMAD", "HFMA2", "UIMAD") and factors in (["RZ", "RZ"], ["URZ", "URZ"])
