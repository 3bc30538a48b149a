// Returns over NumPy arrays. returns.py has made them contiguous and of one dtype; what is wrong here is our mistake.
#include <limits>

#include "bind.h"
#include "returns/returns.h"

using namespace sharpwave;

namespace {

// The numbers of an array, or null for None.
template <class Value>
Value* numbers(nb::handle array, npy_intp count, int type) {
    if (array.is_none()) return nullptr;
    auto* object = reinterpret_cast<PyArrayObject*>(array.ptr());
    if (!PyArray_Check(array.ptr()) || !PyArray_IS_C_CONTIGUOUS(object) || PyArray_SIZE(object) != count ||
        PyArray_TYPE(object) != type) {
        throw Error(ErrorKind::schema, "returns: an array of another size or dtype; this is a defect of Sharpwave");
    }
    return static_cast<Value*>(PyArray_DATA(object));
}

template <class Value>
constexpr int kType = std::is_same_v<Value, float>    ? NPY_FLOAT
                      : std::is_same_v<Value, double> ? NPY_DOUBLE
                                                      : NPY_BOOL;

struct Arrays {
    nb::handle rewards, values, dones, last_values, truncated, final_values, mask;
    double gamma, lambda;
};

// The shape is that of the rewards: two axes.
template <class Real, class Flag>
Rollout<Real, Flag> rollout_of(const Arrays& arrays) {
    auto* rewards = reinterpret_cast<PyArrayObject*>(arrays.rewards.ptr());
    const npy_intp steps = PyArray_DIM(rewards, 0), envs = PyArray_DIM(rewards, 1), count = steps * envs;
    Rollout<Real, Flag> rollout;
    rollout.steps = static_cast<std::size_t>(steps);
    rollout.envs = static_cast<std::size_t>(envs);
    rollout.rewards = numbers<Real>(arrays.rewards, count, kType<Real>);
    rollout.values = numbers<Real>(arrays.values, count, kType<Real>);
    rollout.dones = numbers<Flag>(arrays.dones, count, kType<Flag>);
    rollout.truncated = numbers<Flag>(arrays.truncated, count, kType<Flag>);
    rollout.final_values = numbers<Real>(arrays.final_values, count, kType<Real>);
    rollout.last_values = numbers<Real>(arrays.last_values, envs, kType<Real>);
    rollout.mask = numbers<std::uint8_t>(arrays.mask, count, NPY_BOOL);
    rollout.gamma = arrays.gamma;
    rollout.lambda = arrays.lambda;
    return rollout;
}

// Calls work<Real, Flag>() for the dtypes of the arrays.
template <class Work>
void by_dtype(const Arrays& arrays, const Work& work) {
    if (!PyArray_Check(arrays.rewards.ptr()) || !PyArray_Check(arrays.dones.ptr()) ||
        PyArray_NDIM(reinterpret_cast<PyArrayObject*>(arrays.rewards.ptr())) != 2) {
        throw Error(ErrorKind::schema, "returns: expected (steps, envs) arrays; this is a defect of Sharpwave");
    }
    const bool is_double = PyArray_TYPE(reinterpret_cast<PyArrayObject*>(arrays.rewards.ptr())) == NPY_DOUBLE;
    const bool is_flag = PyArray_TYPE(reinterpret_cast<PyArrayObject*>(arrays.dones.ptr())) == NPY_BOOL;
    if (is_double)
        return is_flag ? work.template operator()<double, std::uint8_t>() : work.template operator()<double, double>();
    is_flag ? work.template operator()<float, std::uint8_t>() : work.template operator()<float, float>();
}

}  // namespace

void bind_returns(nb::module_& m) {
    m.def(
        "gae",
        [](nb::handle rewards, nb::handle values, nb::handle dones, nb::handle last_values, nb::handle truncated,
           nb::handle final_values, nb::handle mask, double gamma, double lambda, nb::handle advantages,
           nb::handle returns) {
            const Arrays arrays{rewards, values, dones, last_values, truncated, final_values, mask, gamma, lambda};
            by_dtype(arrays, [&]<class Real, class Flag>() {
                const auto rollout = rollout_of<Real, Flag>(arrays);
                const auto count = static_cast<npy_intp>(rollout.steps * rollout.envs);
                auto* to = numbers<Real>(advantages, count, kType<Real>);
                auto* also = numbers<Real>(returns, count, kType<Real>);
                const PatientRelease release;
                gae(rollout, to, also);
            });
        },
        nb::arg("rewards"), nb::arg("values"), nb::arg("dones"), nb::arg("last_values"), nb::arg("truncated").none(),
        nb::arg("final_values").none(), nb::arg("mask").none(), nb::arg("gamma"), nb::arg("gae_lambda"),
        nb::arg("advantages"), nb::arg("returns"));
    m.def(
        "discounted",
        [](nb::handle rewards, nb::handle dones, nb::handle last_values, nb::handle truncated, nb::handle final_values,
           double gamma, nb::handle returns) {
            const Arrays arrays{rewards, nb::none(), dones, last_values, truncated, final_values, nb::none(), gamma, 1};
            by_dtype(arrays, [&]<class Real, class Flag>() {
                const auto rollout = rollout_of<Real, Flag>(arrays);
                const auto count = static_cast<npy_intp>(rollout.steps * rollout.envs);
                auto* to = numbers<Real>(returns, count, kType<Real>);
                const PatientRelease release;
                discounted(rollout, to);
            });
        },
        nb::arg("rewards"), nb::arg("dones"), nb::arg("last_values"), nb::arg("truncated").none(),
        nb::arg("final_values").none(), nb::arg("gamma"), nb::arg("returns"));
    m.def(
        "vtrace",
        [](nb::handle rewards, nb::handle values, nb::handle dones, nb::handle last_values, nb::handle truncated,
           nb::handle final_values, nb::handle mask, nb::handle rhos, double gamma, double lambda, double rho_clip,
           double c_clip, double pg_rho_clip, nb::handle targets, nb::handle advantages) {
            const Arrays arrays{rewards, values, dones, last_values, truncated, final_values, mask, gamma, lambda};
            by_dtype(arrays, [&]<class Real, class Flag>() {
                VTrace<Real, Flag> input{rollout_of<Real, Flag>(arrays), nullptr, rho_clip, c_clip, pg_rho_clip};
                const auto count = static_cast<npy_intp>(input.rollout.steps * input.rollout.envs);
                input.rhos = numbers<Real>(rhos, count, kType<Real>);
                auto* to = numbers<Real>(targets, count, kType<Real>);
                auto* also = numbers<Real>(advantages, count, kType<Real>);
                const PatientRelease release;
                vtrace(input, to, also);
            });
        },
        nb::arg("rewards"), nb::arg("values"), nb::arg("dones"), nb::arg("last_values"), nb::arg("truncated").none(),
        nb::arg("final_values").none(), nb::arg("mask").none(), nb::arg("rhos"), nb::arg("gamma"), nb::arg("lam"),
        nb::arg("rho_clip"), nb::arg("c_clip"), nb::arg("pg_rho_clip"), nb::arg("targets"), nb::arg("advantages"));
    m.def(
        "group_relative",
        [](nb::handle rewards, nb::handle groups, std::size_t group_count, bool scales, bool leaves_out, double eps,
           nb::handle advantages) {
            const auto rows = PyArray_SIZE(reinterpret_cast<PyArrayObject*>(rewards.ptr()));
            const Groups input{static_cast<std::size_t>(rows),
                               group_count,
                               numbers<std::int64_t>(groups, rows, NPY_INT64),
                               scales,
                               leaves_out,
                               eps};
            if (PyArray_TYPE(reinterpret_cast<PyArrayObject*>(rewards.ptr())) == NPY_DOUBLE) {
                group_relative(input, numbers<double>(rewards, rows, NPY_DOUBLE),
                               numbers<double>(advantages, rows, NPY_DOUBLE));
            } else {
                group_relative(input, numbers<float>(rewards, rows, NPY_FLOAT),
                               numbers<float>(advantages, rows, NPY_FLOAT));
            }
        },
        nb::arg("rewards"), nb::arg("groups"), nb::arg("group_count"), nb::arg("scales"), nb::arg("leaves_out"),
        nb::arg("eps"), nb::arg("advantages"));
}
