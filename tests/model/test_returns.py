"""Returns against the oracle: the engine's over NumPy arrays and tensors, the GPU's kernels in Triton's interpreter
and, where there is one (`-m gpu`), on a GPU."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import returns_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

import sharpwave as sw
from sharpwave.errors import SchemaError

torch = pytest.importorskip("torch")
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

PLACES = ["numpy", "torch", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "cuda" and not HAS_GPU:
        pytest.skip("no GPU here")
    if name == "interpreter":
        pytest.importorskip("triton")
        if HAS_GPU:
            pytest.skip("the kernels run on the GPU here")
        from sharpwave import returns
        from sharpwave.device import returns as kernels

        monkeypatch.setattr(returns, "torch_kernels", lambda where, device: kernels)
    return name


def there(value: Any, place: str) -> Any:
    if not isinstance(value, np.ndarray) or place == "numpy":
        return value
    return torch.from_numpy(value.copy()).to("cuda" if place == "cuda" else "cpu")


def here(value: Any) -> Any:
    return value if isinstance(value, np.ndarray) else value.cpu().numpy()


def moved(r: dict[str, Any], place: str) -> dict[str, Any]:
    return {name: there(value, place) for name, value in r.items()}


def rollout(
    stream: np.random.Generator,
    steps: int,
    envs: int,
    dtype: Any = np.float32,
    ends: str = "both",
    flags: Any = bool,
    masks: bool = False,
) -> dict[str, Any]:
    r: dict[str, Any] = {
        "rewards": stream.normal(size=(steps, envs)).astype(dtype),
        "values": stream.normal(size=(steps, envs)).astype(dtype),
        "dones": (stream.random((steps, envs)) < 0.2).astype(flags),
        "last_values": stream.normal(size=envs).astype(dtype),
    }
    if ends != "terminated":
        r["truncated"] = (r["dones"].astype(bool) & (stream.random((steps, envs)) < 0.5)).astype(flags)
        r["final_values"] = "next" if ends == "next" else stream.normal(size=(steps, envs)).astype(dtype)
    if masks:
        r["mask"] = stream.random((steps, envs)) > 0.2
    return r


# ---- the cases of the textbooks ----------------------------------------------------------------------------------

BASE = {
    "rewards": np.array([[1.0], [2.0], [3.0]], np.float32),
    "values": np.array([[10.0], [20.0], [30.0]], np.float32),
    "last_values": np.array([40.0], np.float32),
}
MIDDLE = np.array([[0], [1], [0]], bool)
FINAL = np.array([[np.nan], [25.0], [np.nan]], np.float32)
# What others answer to a truncated step, and why.
WRONG = {
    "the value of the step's own observation": (9, 0, 9),
    "truncation as termination": (0.9, -18, 9),
    "truncation overlooked: advantages leak into the episode before": (14.8725, 13.05, 9),
    "the own value added, and the leak": (22.9725, 31.05, 9),
}


def test_truncated_terminated_and_running_are_told_apart(place: str) -> None:
    def ask(**ends: Any) -> tuple[list[float], list[float]]:
        advantages, returns = sw.returns.gae(**moved(BASE | ends, place), gamma=0.9, gae_lambda=0.5)
        return here(advantages).ravel().tolist(), here(returns).ravel().tolist()

    cut = ask(dones=MIDDLE, truncated=MIDDLE, final_values=FINAL)
    assert cut[0] == pytest.approx([11.025, 4.5, 9.0])
    assert cut[1] == pytest.approx([21.025, 24.5, 39.0])
    over = ask(dones=MIDDLE)
    assert over[0] == pytest.approx([0.9, -18.0, 9.0])
    assert over[1] == pytest.approx([10.9, 2.0, 39.0])
    goes_on = ask(dones=~MIDDLE & False)
    assert goes_on[0] == pytest.approx([14.8725, 13.05, 9.0])
    for why, wrong in WRONG.items():
        assert cut[0] != pytest.approx(list(wrong)), why


@pytest.mark.parametrize("at", [0, -1])
def test_ends_on_the_first_and_on_the_last_row(place: str, at: int) -> None:
    r = rollout(np.random.default_rng(at + 5), 6, 3, ends="terminated")
    r["dones"][:] = False
    r["dones"][at] = True
    r["truncated"] = r["dones"] & np.array([True, False, False])
    r["final_values"] = np.full((6, 3), np.nan, np.float32)
    r["final_values"][at] = 7
    if at == -1:
        r["last_values"][:] = np.nan  # nobody may look
    got = sw.returns.gae(**moved(r, place))
    for ours, want in zip(got, oracle.gae(r, 0.99, 0.95), strict=True):
        np.testing.assert_allclose(here(ours), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("envs", [1, 7, 1024, 4096])
@pytest.mark.parametrize("ends", ["terminated", "both", "next"])
def test_few_and_many_envs(place: str, envs: int, ends: str) -> None:
    if place == "interpreter" and envs > 1024:
        pytest.skip("slow there")
    r = rollout(np.random.default_rng(envs), 5, envs, ends=ends, masks=ends == "next")
    got = sw.returns.gae(**moved(r, place))
    for ours, want in zip(got, oracle.gae(r, 0.99, 0.95), strict=True):
        np.testing.assert_allclose(here(ours), want, rtol=1e-5, atol=1e-5)


def test_threads_give_what_one_gives() -> None:
    r = rollout(np.random.default_rng(0), 64, 5000)
    whole = sw.returns.gae(**r)
    parts = [sw.returns.gae(**{k: np.ascontiguousarray(v[..., i::2]) for k, v in r.items()}) for i in (0, 1)]
    for k in (0, 1):
        for i in (0, 1):
            np.testing.assert_array_equal(whole[k][:, i::2], parts[i][k])


# ---- any rollout -------------------------------------------------------------------------------------------------

ROLLOUTS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "steps": st.integers(1, 40),
        "envs": st.integers(1, 20),
        "dtype": st.sampled_from([np.float32, np.float64]),
        "flags": st.sampled_from([bool, np.float32, np.float64, np.uint8, np.int64]),
        "masks": st.booleans(),
    }
)


def drawn(options: dict[str, Any], ends: str) -> dict[str, Any]:
    return rollout(np.random.default_rng(options.pop("seed")), **options, ends=ends)


def close(got: Any, want: Any, dtype: Any) -> None:
    exact = 1e-5 if dtype == np.float32 else 1e-12
    got = here(got)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, want, rtol=exact, atol=exact * 10)


EXAMPLES = {"numpy": 60, "torch": 40, "interpreter": 12, "cuda": 60}


def each(place: str, check: Any, **strategies: Any) -> None:
    """Hypothesis with as many examples as a place has time for."""
    settings(
        max_examples=EXAMPLES[place] * (10 if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else 1), deadline=None
    )(given(**strategies)(check))()


NUMBERS = st.floats(0, 1)
ENDS = st.sampled_from(["terminated", "both", "next"])


def test_gae(place: str) -> None:
    def check(options: dict[str, Any], ends: str, gamma: float, lam: float) -> None:
        r = drawn(options, ends)
        got = sw.returns.gae(**moved(r, place), gamma=gamma, gae_lambda=lam)
        for ours, want in zip(got, oracle.gae(r, gamma, lam), strict=True):
            close(ours, want, r["rewards"].dtype)

    each(place, check, options=ROLLOUTS, ends=ENDS, gamma=NUMBERS, lam=NUMBERS)


def test_lambda_and_discounted_returns(place: str) -> None:
    def check(options: dict[str, Any], ends: str, gamma: float, lam: float) -> None:
        r = drawn(options | {"masks": False}, ends)
        close(
            sw.returns.lambda_returns(**moved(r, place), gamma=gamma, lam=lam),
            oracle.gae(r, gamma, lam)[1],
            r["rewards"].dtype,
        )
        values = r.pop("values")
        del values
        if r.get("final_values", 0) is not None and not isinstance(r.get("final_values"), str):
            close(
                sw.returns.discounted_returns(**moved(r, place), gamma=gamma),
                oracle.discounted(r, gamma),
                r["rewards"].dtype,
            )

    each(place, check, options=ROLLOUTS, ends=ENDS, gamma=NUMBERS, lam=NUMBERS)


CLIPS = st.one_of(st.none(), st.floats(0.1, 3))


def test_vtrace(place: str) -> None:
    def check(options: dict[str, Any], ends: str, gamma: float, lam: float, rho: Any, c: Any, pg: Any) -> None:
        r = drawn(options, ends)
        dtype = r["rewards"].dtype
        stream = np.random.default_rng(1)
        target, behaviour = (stream.normal(size=r["rewards"].shape).astype(dtype) for _ in range(2))
        clips = {"rho_clip": rho, "c_clip": c, "pg_rho_clip": pg}
        got = sw.returns.vtrace(
            **moved(r | {"log_probs": target, "behaviour_log_probs": behaviour}, place), gamma=gamma, lam=lam, **clips
        )
        most = [np.inf if clip is None else clip for clip in clips.values()]
        want = oracle.vtrace(r, target.astype(float) - behaviour, gamma, lam, *most)
        exact = 2e-3 if dtype == np.float32 else 1e-9  # ratios of up to e^6 multiply up
        for ours, right in zip(got, want, strict=True):
            scale = max(1.0, float(np.abs(right).max()))
            np.testing.assert_allclose(here(ours) / scale, right / scale, rtol=0, atol=exact)

    each(place, check, options=ROLLOUTS, ends=ENDS, gamma=NUMBERS, lam=NUMBERS, rho=CLIPS, c=CLIPS, pg=CLIPS)


def test_vtrace_of_the_acting_policy_is_gae_at_lambda_one(place: str) -> None:
    r = rollout(np.random.default_rng(3), 9, 4)
    same = np.zeros((9, 4), np.float32)
    targets, _ = sw.returns.vtrace(**moved(r | {"log_probs": same, "behaviour_log_probs": same}, place))
    np.testing.assert_allclose(here(targets), oracle.gae(r, 0.99, 1.0)[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", ["std", None])
@pytest.mark.parametrize("baseline", ["mean", "others"])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_group_relative(place: str, size: int, baseline: Any, scale: Any) -> None:
    rewards = np.random.default_rng(size).normal(size=size * 6).astype(np.float32)
    groups = np.arange(size * 6) // size
    want = oracle.group_relative(rewards, groups, scale == "std", baseline == "others", 1e-6)
    options = {"baseline": baseline, "scale": scale}
    got = sw.returns.group_relative_advantages(there(rewards, place), group_size=size, **options)
    np.testing.assert_allclose(here(got), want, rtol=1e-4, atol=1e-5)
    mixed = np.random.default_rng(0).permutation(len(groups))
    got = sw.returns.group_relative_advantages(
        there(rewards[mixed], place), groups=there(groups[mixed], place), **options
    )
    np.testing.assert_allclose(here(got), want[mixed], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_equal_rewards_are_nobodys_advantage(place: str, size: int, eps: float) -> None:
    for value in (365.11, 765.9, 0.1, -1e-3):
        rewards = np.full(4 * size, value, np.float32)
        groups = there(np.repeat(np.arange(4), size), place)
        for how in ({"group_size": size}, {"groups": groups}):
            got = sw.returns.group_relative_advantages(there(rewards, place), eps=eps, **how)
            assert not here(got).any()


@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("others", [True, False])
def test_groups_by_number_as_on_a_gpu(scales: bool, others: bool) -> None:
    """What a GPU does by torch alone needs none to be tested."""
    pytest.importorskip("triton")
    from sharpwave.device import returns as kernels

    stream = np.random.default_rng(0)
    groups = stream.integers(0, 7, 40)
    for rewards in (stream.normal(size=40), np.full(40, 765.9)):
        got = kernels.group_relative_of(
            torch.from_numpy(rewards).float(), torch.from_numpy(groups), scales, others, 1e-6
        )
        want = oracle.group_relative(rewards.astype(np.float32), groups, scales, others, 1e-6)
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-5)
        assert rewards.std() > 0.1 or not got.any()


def test_groups_of_doubles_are_exact(place: str) -> None:
    rewards = np.random.default_rng(0).normal(size=21)
    groups = np.arange(21) // 7
    want = oracle.group_relative(rewards, groups, True, True, 1e-6)
    got = sw.returns.group_relative_advantages(there(rewards, place), group_size=7, baseline="others")
    np.testing.assert_allclose(here(got), want, rtol=1e-6)


# ---- what must not be used ---------------------------------------------------------------------------------------


def test_nan_that_must_not_be_used_stays_where_it_is(place: str) -> None:
    r = rollout(np.random.default_rng(2), 8, 5)
    r["dones"][:] = False
    r["dones"][3] = True
    r["truncated"] = r["dones"] & np.array([1, 0, 1, 0, 1], bool)
    r["final_values"][:] = np.where(r["truncated"], 1.5, np.nan)
    r["values"][4:] = np.nan  # another episode's
    r["last_values"][:] = np.nan
    for gae_lambda in (0.95, 0.0):
        advantages, _ = sw.returns.gae(**moved(r, place), gae_lambda=gae_lambda)
        assert np.isfinite(here(advantages)[:4]).all()
    assert np.isfinite(here(sw.returns.lambda_returns(**moved(r, place))))[:4].all()
    targets, advantages = sw.returns.vtrace(
        **moved(r | {"log_probs": r["rewards"], "behaviour_log_probs": r["rewards"]}, place)
    )
    assert np.isfinite(here(targets)[:4]).all()
    assert np.isfinite(here(advantages)[:4]).all()
    r.pop("values")
    assert np.isfinite(here(sw.returns.discounted_returns(**moved(r, place)))[:4]).all()


def test_nothing_passes_a_masked_row(place: str) -> None:
    r = rollout(np.random.default_rng(2), 6, 3, ends="terminated")
    r["dones"][:] = False
    r["mask"] = np.ones((6, 3), bool)
    r["mask"][3:] = False
    r["rewards"][3:] = np.nan
    advantages, _ = sw.returns.gae(**moved(r, place))
    assert np.isfinite(here(advantages)).all()
    np.testing.assert_allclose(here(advantages), oracle.gae(r, 0.99, 0.95)[0], rtol=1e-5, atol=1e-5)


def test_nan_that_must_be_used_is_seen(place: str) -> None:
    r = rollout(np.random.default_rng(2), 4, 3, ends="terminated")
    r["dones"][:] = False
    log_probs = np.zeros((4, 3), np.float32)
    log_probs[2] = np.nan
    targets, advantages = sw.returns.vtrace(
        **moved(r | {"log_probs": log_probs, "behaviour_log_probs": log_probs * 0}, place)
    )
    assert np.isnan(here(advantages)[2]).all()
    assert np.isnan(here(targets)[:3]).all()


def test_one_step_advantages_look_one_step_ahead(place: str) -> None:
    r = rollout(np.random.default_rng(2), 4, 3, ends="terminated")
    r["dones"][:] = False
    r["values"][3] = np.nan  # of no concern to rows 0 and 1
    advantages, _ = sw.returns.gae(**moved(r, place), gae_lambda=0.0)
    assert np.isfinite(here(advantages)[:2]).all()


# ---- shapes and refusals -----------------------------------------------------------------------------------------


def test_one_env_may_come_without_its_axis_and_further_axes_count_as_envs(place: str) -> None:
    r = rollout(np.random.default_rng(0), 6, 12)
    whole, _ = sw.returns.gae(**moved(r, place))
    line = {name: np.ascontiguousarray(value[..., 3]) for name, value in r.items()}
    one, _ = sw.returns.gae(**moved(line | {"last_values": float(r["last_values"][3])}, place))
    np.testing.assert_allclose(here(one), here(whole)[:, 3], rtol=1e-6)
    cube = {name: value.reshape(*value.shape[:-1], 3, 4) for name, value in r.items()}
    folded, _ = sw.returns.gae(**moved(cube, place))
    np.testing.assert_array_equal(here(folded).reshape(6, 12), here(whole))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"truncated": np.zeros((3, 2), bool)}, r"truncated: needs final_values="),
        ({"final_values": np.zeros((3, 2), np.float32)}, "final_values: needs truncated="),
        ({"values": np.zeros((3, 3), np.float32)}, r"values: expected shape \(3, 2\), got \(3, 3\)"),
        ({"last_values": np.zeros(3, np.float32)}, r"last_values: expected shape \(2,\), got \(3,\)"),
        ({"gamma": 1.5}, "gamma: expected a number, 0 to 1"),
        ({"values": None}, r"values: expected an array, got None; discounted_returns\(\) needs none"),
        ({"dones": None}, "dones: expected an array, got None"),
        ({"rewards": np.zeros((0, 2), np.float32)}, "rewards: expected shape"),
        ({"rewards": np.array([["a", "b"]])}, "rewards: expected numbers"),
    ],
)
def test_refusals_say_what_mends(change: dict[str, Any], says: str) -> None:
    r = rollout(np.random.default_rng(0), 3, 2, ends="terminated")
    with pytest.raises(SchemaError, match=says):
        sw.returns.gae(**(r | change))


def test_lists_and_infinite_clips_will_do() -> None:
    got = sw.returns.group_relative_advantages([1.0, 3.0, 5.0, 5.0], groups=[0, 0, 1, 1], scale=None)
    assert got.tolist() == [-1.0, 1.0, 0.0, 0.0]
    r = rollout(np.random.default_rng(0), 3, 2, ends="terminated") | {"log_probs": np.zeros((3, 2)), "gamma": 0.9}
    unclipped = [sw.returns.vtrace(**r, behaviour_log_probs=np.ones((3, 2)), rho_clip=most) for most in (None, np.inf)]
    np.testing.assert_array_equal(unclipped[0], unclipped[1])


def test_arrays_and_tensors_do_not_mix() -> None:
    r = rollout(np.random.default_rng(0), 3, 2, ends="terminated")
    with pytest.raises(SchemaError, match="values: expected a NumPy array like rewards"):
        sw.returns.gae(**(r | {"values": torch.zeros(3, 2)}))
    with pytest.raises(SchemaError, match="values: expected a tensor like rewards"):
        sw.returns.gae(**(moved(r, "torch") | {"values": r["values"]}))


def test_no_gradient_and_no_shared_memory() -> None:
    r = moved(rollout(np.random.default_rng(0), 3, 2, ends="terminated"), "torch")
    r["values"].requires_grad_()
    before = r["rewards"].clone()
    advantages, returns = sw.returns.gae(**r)
    assert not advantages.requires_grad
    advantages.zero_()
    returns.zero_()
    assert torch.equal(r["rewards"], before)
