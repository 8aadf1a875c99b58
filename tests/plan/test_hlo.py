"""Bytes that a program moves, on programs short enough to add up by hand."""

import pytest

from rsearch.plan.hlo import array_bytes, kernels, moved

# A loop of five rounds over layers of 4 KB, inside a loop of unknown length; and an
# in-place update, a copy into a smaller memory, a branch and two collectives.
PROGRAM = """\
HloModule example

%body (b: (s32[], f32[5,32,32], f32[32,32])) -> (s32[], f32[5,32,32], f32[32,32]) {
  %b = (s32[], f32[5,32,32]{2,1,0}, f32[32,32]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%b), index=0
  %w = f32[5,32,32]{2,1,0} get-tuple-element(%b), index=1
  %x = f32[32,32]{1,0} get-tuple-element(%b), index=2
  %y = f32[32,32]{1,0} fusion(%w, %i, %x), kind=kOutput, calls=%layer
  %all = f32[32,32]{1,0} all-reduce(%y), replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (s32[], f32[5,32,32]{2,1,0}, f32[32,32]{1,0}) tuple(%i, %w, %all)
}

%layer (p: f32[5,32,32], q: s32[], r: f32[32,32]) -> f32[32,32] {
  %p = f32[5,32,32]{2,1,0} parameter(0)
  %q = s32[]{:T(128)} parameter(1)
  %r = f32[32,32]{1,0} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  %one = f32[1,32,32]{2,1,0} dynamic-slice(%p, %q, %zero, %zero)
  %flat = f32[32,32]{1,0} bitcast(%one)
  ROOT %m = f32[32,32]{1,0} multiply(%flat, %r)
}

%if (c: (s32[], f32[5,32,32], f32[32,32])) -> pred[] {
  %c = (s32[], f32[5,32,32]{2,1,0}, f32[32,32]{1,0}) parameter(0)
  %n = s32[]{:T(128)} constant(5)
  %j = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %lt = pred[]{:T(512)} compare(%j, %n), direction=LT
}

%outer (o: (s32[], f32[5,32,32], f32[32,32])) -> (s32[], f32[5,32,32], f32[32,32]) {
  %o = (s32[], f32[5,32,32]{2,1,0}, f32[32,32]{1,0}) parameter(0)
  ROOT %inner = (s32[], f32[5,32,32], f32[32,32]) while(%o), condition=%if, body=%body
}

%until (u: (s32[], f32[5,32,32], f32[32,32])) -> pred[] {
  %u = (s32[], f32[5,32,32]{2,1,0}, f32[32,32]{1,0}) parameter(0)
  %k = s32[]{:T(128)} get-tuple-element(%u), index=0
  ROOT %gt = pred[]{:T(512)} compare(%k, %k), direction=GT
}

%change (d: f32[5,32,32], e: f32[1,32,32], f: s32[]) -> f32[5,32,32] {
  %d = f32[5,32,32]{2,1,0} parameter(0)
  %e = f32[1,32,32]{2,1,0} parameter(1)
  %f = s32[]{:T(128)} parameter(2)
  %none = s32[]{:T(128)} constant(0)
  ROOT %dus = f32[5,32,32]{2,1,0} dynamic-update-slice(%d, %e, %f, %none, %none)
}

%cheap (g: f32[32,32]) -> f32[32,32] {
  ROOT %g = f32[32,32]{1,0} parameter(0)
}

%dear (h: f32[32,32]) -> f32[32,32] {
  %h = f32[32,32]{1,0} parameter(0)
  ROOT %neg = f32[32,32]{1,0} negate(%h)
}

ENTRY %main (a: (s32[], f32[5,32,32], f32[32,32]), v: f32[1,32,32]) -> f32[32,32] {
  %a = (s32[], f32[5,32,32]{2,1,0}, f32[32,32]{1,0}) parameter(0)
  %v = f32[1,32,32]{2,1,0} parameter(1)
  %loop = (s32[], f32[5,32,32], f32[32,32]) while(%a), condition=%until, body=%outer
  %at = s32[]{:T(128)} get-tuple-element(%loop), index=0
  %cache = f32[5,32,32]{2,1,0} get-tuple-element(%loop), index=1
  %new = f32[5,32,32]{2,1,0} fusion(%cache, %v, %at), kind=kLoop, calls=%change
  %last = f32[32,32]{1,0} get-tuple-element(%loop), index=2
  %fast = (f32[32,32]{1,0:S(1)}, f32[32,32]{1,0}, u32[]) copy-start(%last)
  %there = f32[32,32]{1,0:S(1)} copy-done(%fast)
  %twice = f32[32,32]{1,0:S(1)} add(%there, %there)
  %branch = f32[32,32] conditional(%at, %v, %v), branch_computations={%cheap, %dear}
  ROOT %both = f32[64,32]{1,0} all-gather(%branch), dimensions={0}
}
"""
ARRAY = 32 * 32 * 4


@pytest.mark.parametrize("rounds", [1, 7])
def test_each_line_of_a_program_moves_its_bytes_as_often_as_it_runs(rounds):
    actual = moved(PROGRAM, rounds=rounds)
    # A layer reads its slice, the activations and the index, and writes the result.
    layer = 3 * ARRAY + 4
    # The in-place update reads the change and the index and writes the change; the rest
    # of the array is not moved.
    change = 2 * ARRAY + 4
    # The copy into the smaller memory reads once; computing there is free.
    copied, branch = ARRAY, 2 * ARRAY
    assert actual.memory == rounds * 5 * layer + change + copied + branch
    assert actual.links == {
        "all-reduce": (rounds * 5, rounds * 5 * 2 * ARRAY),
        "all-gather": (1, 2 * ARRAY),
    }
    assert actual.sent == rounds * 5 * 2 * ARRAY + 2 * ARRAY


def test_bytes_of_shapes():
    assert array_bytes("bf16[2,3]{1,0:T(8,128)(2,1)}") == 12
    assert array_bytes("(f32[4], pred[8], s32[])") == 16 + 8 + 4
    assert array_bytes("f32[4]{0:T(128)S(1)}") == 0
    assert array_bytes("f32[4]{0:T(128)S(1)}", in_memory=False) == 16
    assert array_bytes("token[]") == 0


def test_paged_attention_reads_only_the_pages_that_its_table_names():
    text = """HloModule m

ENTRY %main (t: s32[12]) -> f32[2,4,1,128] {
  %len = s32[2]{0} parameter(0)
  %table = s32[12]{0} parameter(1)
  %q = f32[2,4,1,128]{3,2,1,0} parameter(2)
  %k = bf16[2,100,16,128]{3,2,1,0} parameter(3)
  ROOT %out = f32[2,4,1,128]{3,2,1,0} custom-call(%len, %table, %q, %k), custom_call_target="tpu_custom_call", metadata={op_name="jit(paged_attention)/pallas_call"}
}
"""  # noqa: E501
    row, pages = 2 * 4 * 128 * 4, 12 * 2 * 16 * 128 * 2
    assert moved(text).memory == 2 * 4 + 12 * 4 + 2 * row + pages


def test_an_asynchronous_operation_counts_only_the_bytes_that_it_moves():
    """A slice of a stack goes into a smaller memory; a product and a sum follow."""
    text = """HloModule m

%product (p: f32[32,32]) -> f32[32,32] {
  %p = f32[32,32]{1,0} parameter(0)
  ROOT %dot = f32[32,32]{1,0} custom-call(%p), custom_call_target="my_kernel"
}

%shared (s: f32[32,32]) -> f32[16,32] {
  %s = f32[32,32]{1,0} parameter(0)
  ROOT %rs = f32[16,32]{1,0} reduce-scatter(%s), dimensions={0}, to_apply=%add
}

ENTRY %main (w: f32[5,32,32], x: f32[32,32], i: s32[]) -> f32[16,32] {
  %w = f32[5,32,32]{2,1,0:T(8,128)} parameter(0)
  %x = f32[32,32]{1,0} parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  %begin = ((f32[5,32,32]{2,1,0:T(8,128)}, s32[]{:T(128)}, s32[]{:T(128)}), f32[1,32,32]{2,1,0:T(8,128)S(1)}, u32[]{:S(2)}) dynamic-slice-start(%w, %i, %i)
  %end = f32[1,32,32]{2,1,0:T(8,128)S(1)} dynamic-slice-done(%begin)
  %run = ((f32[32,32]{1,0}), f32[32,32]{1,0}, u32[]) async-start(%x), calls=%product
  %ran = f32[32,32]{1,0} async-done(%run)
  %send = ((f32[32,32]{1,0}), f32[16,32]{1,0}, u32[]) async-start(%ran), calls=%shared
  ROOT %sent = f32[16,32]{1,0} async-done(%send)
}
"""  # noqa: E501
    actual = moved(text)
    assert actual.memory == ARRAY + 2 * ARRAY
    assert actual.links == {"reduce-scatter": (1, ARRAY)}
    assert kernels(text) == {"my_kernel": 1, "reduce-scatter": 1}


# As for a GPU: a loop whose trip count XLA knows, around a library's matmul with a
# workspace, a Triton fusion and a copy; and a call of a named computation.
GPU_PROGRAM = """\
HloModule example

%product (p: bf16[32,32], r: bf16[32,32]) -> bf16[32,32] {
  %p = bf16[32,32]{1,0} parameter(0)
  %r = bf16[32,32]{1,0} parameter(1)
  ROOT %dot = bf16[32,32]{1,0} dot(%p, %r), lhs_contracting_dims={1}
}

%copied (s: bf16[7,32,32], n: s32[]) -> bf16[1,32,32] {
  %s = bf16[7,32,32]{2,1,0} parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = bf16[1,32,32]{2,1,0} dynamic-slice(%s, %n, %zero, %zero)
  ROOT %copy = bf16[1,32,32]{2,1,0} copy(%cut)
}

%body (b: (s32[], bf16[7,32,32], bf16[32,32])) -> (s32[], bf16[7,32,32], bf16[32,32]) {
  %b = (s32[], bf16[7,32,32]{2,1,0}, bf16[32,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %w = bf16[7,32,32]{2,1,0} get-tuple-element(%b), index=1
  %x = bf16[32,32]{1,0} get-tuple-element(%b), index=2
  %layer = bf16[1,32,32]{2,1,0} fusion(%w, %i), kind=kCustom, calls=%copied, backend_config={"fusion_backend_config":{"kind":"__custom_fusion","custom_fusion_config":{"name":"dynamic_slice_fusion"}}}
  %flat = bf16[32,32]{1,0} bitcast(%layer)
  %y = bf16[32,32]{1,0} fusion(%x, %flat), kind=kCustom, calls=%product, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %z = (bf16[32,32]{1,0}, s8[4194304]{0}) custom-call(%y, %flat), custom_call_target="__cublas$lt$matmul"
  %first = bf16[32,32]{1,0} get-tuple-element(%z), index=0
  ROOT %t = (s32[], bf16[7,32,32]{2,1,0}, bf16[32,32]{1,0}) tuple(%i, %w, %first)
}

%fused_compare (k: s32[]) -> pred[] {
  %k = s32[] parameter(0)
  %seven = s32[] constant(7)
  ROOT %lt = pred[] compare(%k, %seven), direction=LT
}

%until (u: (s32[], bf16[7,32,32], bf16[32,32])) -> pred[] {
  %u = (s32[], bf16[7,32,32]{2,1,0}, bf16[32,32]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%u), index=0
  ROOT %is = pred[] fusion(%j), kind=kLoop, calls=%fused_compare
}

%inside (o: bf16[32,32]) -> bf16[32,32] {
  %o = bf16[32,32]{1,0} parameter(0)
  ROOT %own = bf16[32,32]{1,0} custom-call(%o), custom_call_target="my_kernel"
}

ENTRY %main (a: (s32[], bf16[7,32,32], bf16[32,32])) -> bf16[32,32] {
  %a = (s32[], bf16[7,32,32]{2,1,0}, bf16[32,32]{1,0}) parameter(0)
  %loop = (s32[], bf16[7,32,32], bf16[32,32]) while(%a), condition=%until, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %last = bf16[32,32]{1,0} get-tuple-element(%loop), index=2
  %sum = bf16[32,32]{1,0} all-reduce-start(%last), to_apply=%add
  %done = bf16[32,32]{1,0} all-reduce-done(%sum)
  ROOT %end = bf16[32,32]{1,0} call(%done), to_apply=%inside
}
"""  # noqa: E501


def test_gpu_kernels_are_counted_as_often_as_they_run():
    assert kernels(GPU_PROGRAM) == {
        "dynamic_slice_fusion": 7,
        "Triton matmul": 7,
        "cuBLAS matmul": 7,
        "all-reduce": 1,
        "my_kernel": 1,
    }


def test_a_gpu_loop_has_the_trip_count_that_xla_knows_and_workspaces_are_free():
    matrix = 2 * 32 * 32
    # A layer is copied, then read; each matmul reads two matrices and writes one.
    actual = moved(GPU_PROGRAM)
    assert actual.memory == 7 * ((2 + 3 + 3) * matrix + 4) + 2 * matrix  # 4: an index
    assert actual.links == {"all-reduce": (1.0, 2.0 * matrix)}


# A layer of 4 KB from a stack in 8 bits, which is read in tiles of another shape.
RENAMED = """\
HloModule renamed

%same (p: s8[5,64,64]) -> s8[5,64,64] {
  %p = s8[5,64,64]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %c = s8[5,64,64]{2,1,0:T(8,128)(4,1)} copy(%p)
}

%layer (q: s8[5,64,64], r: s32[]) -> s8[64,64] {
  %q = s8[5,64,64]{2,1,0:T(32,128)(4,1)} parameter(0)
  %r = s32[]{:T(128)} parameter(1)
  %t = s8[5,64,64]{2,1,0:T(8,128)(4,1)} fusion(%q), kind=kLoop, ALIASED calls=%same
  %zero = s32[]{:T(128)} constant(0)
  %one = s8[1,64,64]{2,1,0:T(8,128)(4,1)} dynamic-slice(%t, %r, %zero, %zero)
  ROOT %flat = s8[64,64]{1,0:T(8,128)(4,1)} bitcast(%one)
}

ENTRY %main (w: s8[5,64,64], i: s32[]) -> s8[64,64] {
  %w = s8[5,64,64]{2,1,0:T(32,128)(4,1)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  ROOT %y = s8[64,64]{1,0:T(8,128)(4,1)} fusion(%w, %i), kind=kLoop, calls=%layer
}
"""


@pytest.mark.parametrize(
    ("aliased", "read"),
    [("output_to_operand_aliasing={{}: (0, {})},", 4096), ("", 5 * 4096)],
)
def test_only_a_slice_of_a_stack_is_read_if_its_other_tiling_is_an_alias(aliased, read):
    actual = moved(RENAMED.replace("ALIASED", aliased)).memory
    assert actual == pytest.approx(read + 4096, abs=8)  # and the layer is written
