"""The kernels of a decode step against plain torch: in Triton's interpreter, or on a GPU where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
triton = pytest.importorskip("triton")

from engine_references import made, prompt_of  # noqa: E402

from sharpwave.llm.generators import Engine, Sampling  # noqa: E402
from sharpwave.llm.generators.graph_decode import GraphDecode  # noqa: E402
from sharpwave.llm.kernels import fused, plain  # noqa: E402
from sharpwave.llm.kernels.attention import attend, count_parts  # noqa: E402
from sharpwave.llm.kernels.copies import copy_places  # noqa: E402

DEVICE = "cuda" if HAS_GPU else "cpu"
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = st.sampled_from(list(NEAR))


def normal(*shape, dtype=torch.float32, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source).to(dtype).to(DEVICE)


def numbers(given):
    return torch.tensor(given, device=DEVICE)


@given(
    dtype=DTYPES,
    shared=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4, 7, 17]),
    dim=st.sampled_from([8, 16, 64, 80, 128]),
    context=st.integers(1, 200),
    parts=st.sampled_from([1, 2, 5]),
    rows=st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1)), min_size=1, max_size=4),
)
@settings(max_examples=30)
def test_attention_equals_plain_torch(dtype, shared, group, dim, context, parts, rows):
    keys, values = (normal(3, shared, context + 1, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    slots, places = numbers([slot for slot, _ in rows]), numbers([round(part * context) for _, part in rows])
    for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
        # Places that no row of the slot looks at; the cache holds anything there.
        if int(places[slots == slot].max()) == place:
            keys[slot, :, place + 1 :], values[slot, :, place + 1 :] = float("nan"), float("nan")
    queries = normal(len(rows), shared * group, dim, dtype=dtype, seed=3)
    seen = attend(queries, keys, values, slots, places, parts, 16)
    wanted = plain.attend(queries, keys, values, slots, places)
    assert torch.allclose(seen.float(), wanted.float(), atol=NEAR[dtype])
    assert not seen[places == context].any()


def test_nan_in_a_row_stays_in_it():
    keys, values, queries = normal(2, 1, 41, 16), normal(2, 1, 41, 16, seed=1), normal(2, 2, 16, seed=2)
    keys[1, 0, 3] = float("nan")
    for parts in (1, 3):
        seen = attend(queries, keys, values, numbers([0, 1]), numbers([30, 30]), parts, 16)
        assert seen[0].isfinite().all()
        assert seen[1].isnan().all()


def test_rows_have_more_parts_where_they_are_few_or_long():
    assert count_parts(1, 2, 32768, 132) == 32
    assert count_parts(1, 2, 200, 132) == 1
    assert count_parts(256, 2, 1024, 132) == 2
    assert count_parts(1024, 8, 1024, 132) == 1
    assert count_parts(1024, 8, 32768, 132) == 8


@given(dtype=DTYPES, rows=st.integers(1, 4), size=st.sampled_from([8, 32, 100, 300]), adds=st.booleans())
@settings(max_examples=20)
def test_sums_with_norms_equal_plain_torch(dtype, rows, size, adds):
    x, added, weight = normal(rows, size), normal(rows, size, dtype=dtype, seed=1), normal(size, dtype=dtype, seed=2)
    other = x.clone()
    found = fused.add_and_norm(x, added if adds else None, weight, 1e-6)
    wanted = plain.add_and_norm(other, added if adds else None, weight, 1e-6)
    assert torch.equal(x, other)
    assert found.dtype == wanted.dtype == dtype
    assert torch.allclose(found.float(), wanted.float(), atol=2 * NEAR[dtype], rtol=2 * NEAR[dtype])


@given(
    dtype=DTYPES,
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1)]),
    dim=st.sampled_from([8, 20, 64]),
    has_norms=st.booleans(),
    places=st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
)
@settings(max_examples=12)
def test_heads_get_their_places_as_in_plain_torch(dtype, heads, dim, has_norms, places):
    context, rows = 9, len(places)
    every, shared = heads
    projected = normal(rows, (every + 2 * shared) * dim, dtype=dtype)
    norms = (normal(dim, dtype=dtype, seed=1), normal(dim, dtype=dtype, seed=2)) if has_norms else None
    half = normal(context, dim // 2, seed=3)
    angles = tuple(torch.cat((turn, turn), -1).to(dtype) for turn in (half.cos(), half.sin()))
    caches = [[normal(3, shared, context + 1, dim, dtype=dtype, seed=at) for at in (4, 5)] for _ in range(2)]
    at = numbers([row % 3 for row in range(rows)]), numbers(places)
    found = fused.place_heads(projected, norms, 1e-6, angles, *caches[0], *at)
    wanted = plain.place_heads(projected, norms, 1e-6, angles, *caches[1], *at)
    for one, other in zip((found, *caches[0]), (wanted, *caches[1]), strict=True):
        assert torch.allclose(one.float(), other.float(), atol=NEAR[dtype], rtol=2 * NEAR[dtype])


@given(dtype=DTYPES, rows=st.integers(1, 3), size=st.sampled_from([8, 100, 1500]))
@settings(max_examples=10)
def test_gates_equal_plain_torch(dtype, rows, size):
    both = normal(rows, 2 * size, dtype=dtype)
    assert torch.allclose(fused.gate(both).float(), plain.gate(both).float(), atol=NEAR[dtype], rtol=NEAR[dtype])


def drawn(kernels, logits, temperature, seeds, counts):
    tokens = torch.zeros(len(logits), dtype=torch.int32, device=DEVICE)
    scores = torch.zeros(len(logits), device=DEVICE)
    kernels.draw(logits, temperature, seeds, counts, tokens, scores)
    return tokens, scores


@given(
    dtype=DTYPES,
    shape=st.tuples(st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 65, 150]), st.sampled_from([8, 64, 80])),
    spans=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=3),
)
@settings(max_examples=20)
def test_copies_equal_plain_torch(dtype, shape, spans):
    layers, shared, context, dim = shape
    keys, values = (normal(layers, 6, shared, context + 1, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    wanted = keys.clone(), values.clone()
    ends = [sorted((round(one * context), round(other * context))) for one, other in spans]
    moves = numbers([(target % 2, 3 + target, *span) for target, span in enumerate(ends)])
    copy_places(keys, values, moves)
    plain.copy_places(*wanted, moves)
    assert torch.equal(keys, wanted[0])
    assert torch.equal(values, wanted[1])


@given(
    dtype=DTYPES,
    size=st.sampled_from([1, 5, 40, 4096, 9001]),
    width=st.sampled_from([0.0, 1.0, 30.0]),
    heat=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=25)
def test_draws_equal_plain_torch(dtype, size, width, heat, seed):
    rows = 6
    logits = (normal(rows, size, seed=seed % 1000) * width).to(dtype)
    if size > 4:
        logits[1, : size // 2] = float("-inf")
        logits[2, size // 2 :] = float("-inf")
    temperature = torch.full((rows,), heat, dtype=torch.double, device=DEVICE)
    seeds, counts = numbers([seed] * rows), torch.arange(rows, device=DEVICE)
    tokens, scores = drawn(fused, logits, temperature, seeds, counts)
    wanted, wanted_scores = drawn(plain, logits, temperature, seeds, counts)
    # Two neighbours may be taken for each other where the random number is on the boundary; it is not, in these cases.
    assert torch.equal(tokens, wanted)
    assert torch.allclose(scores, wanted_scores, atol=1e-5)


def test_logits_that_are_nan_give_a_score_that_is_nan():
    logits = normal(3, 50)
    logits[1, 7] = float("nan")
    logits[2] = float("nan")
    for heat in (0.0, 1.0):
        given = torch.full((3,), heat, dtype=torch.double, device=DEVICE), numbers([1, 2, 3]), numbers([0, 0, 0])
        tokens, scores = drawn(fused, logits, *given)
        assert scores.isfinite().tolist() == [True, False, False]
        assert ((tokens >= 0) & (tokens < 50)).all()


@pytest.mark.skipif(HAS_GPU, reason="test_graph_decode.py runs the engine on the GPU")
def test_an_engine_with_these_kernels_gives_the_answers_of_plain_torch():
    answers = []
    for kernels in (plain, fused):
        engine = Engine(made(num_hidden_layers=1), slots=2, context=40, chunk=16)
        engine._decode = GraphDecode(engine.model, engine._cache, engine._sampler, engine.chunk, kernels)
        requests = [engine.submit(prompt_of(3 + 9 * n, n), Sampling(max_tokens=3, seed=n))[0] for n in range(3)]
        engine.run()
        answers.append([request.answer for request in requests])
    for one, other in zip(*answers, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_the_kernels_compile_for_a_gpu(tmp_path):
    """The interpreter takes what the compiler refuses, such as a variable of two types. No GPU is needed for this."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if not ptxas.exists():
        pytest.skip("this Triton has no compiler for NVIDIA's GPUs")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).parent / "compile_kernels.py"
    ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert len(ran.stdout.splitlines()) == 9
