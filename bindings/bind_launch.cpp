// Starts a compiled CUDA kernel. The driver is looked up when the first one is made: nothing is linked against it, and
// where there is none, launch.py starts kernels as Triton does.
#include <dlfcn.h>

#include <array>
#include <cstring>

#include "bind.h"

namespace {

using Function = void*;
using Stream = void*;
using Context = void*;
using Which = int (*)(Context*);
using Choose = int (*)(Context);
using Ask = int (*)(Function, std::size_t, std::size_t*, std::size_t*);
using Start = int (*)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**,
                      void**);

constexpr std::size_t kMostBytes = 4096;  // of a kernel's parameters
constexpr std::size_t kScratches = 2;     // addresses behind them, which a kernel without scratch memory leaves alone
void* const kPointer = reinterpret_cast<void*>(1);  // CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE
void* const kSize = reinterpret_cast<void*>(2);

struct Parameter {
    std::size_t offset, bytes;
};

class Launch {
public:
    // `numbers`: how many the kernel is called with. ValueError: it takes others, or the driver is not one we know.
    Launch(std::uintptr_t function, unsigned threads, unsigned shared, std::size_t numbers, const char* driver)
        : function_(reinterpret_cast<Function>(function)), threads_(threads), shared_(shared) {
        const auto ask = find<Ask>(driver, "cuFuncGetParamInfo");
        start_ = find<Start>(driver, "cuLaunchKernel");
        which_ = find<Which>(driver, "cuCtxGetCurrent");
        choose_ = find<Choose>(driver, "cuCtxSetCurrent");
        if (which_(&context_) != 0 || !context_) throw nb::value_error("Launch(): no CUDA context");
        Parameter next{};
        while (ask(function_, parameters_.size(), &next.offset, &next.bytes) == 0) {
            bytes_ = next.offset + next.bytes;
            if ((next.bytes != 4 && next.bytes != 8) || bytes_ > kMostBytes)
                throw nb::value_error("Launch(): a parameter that is no number");
            parameters_.push_back(next);
        }
        if (parameters_.size() != numbers + kScratches) throw nb::value_error("Launch(): the kernel takes others");
        parameters_.resize(numbers);
    }

    // Whole numbers, or tuples of them. With `steps` each number goes on by so much `times` times: the memory of one
    // batch after the other.
    void run(std::uintptr_t stream, unsigned wide, unsigned high, nb::handle numbers, nb::handle steps,
             std::int64_t times) const {
        alignas(8) std::array<std::byte, kMostBytes> memory;
        std::memset(memory.data(), 0, bytes_);
        std::size_t at = 0;
        PyObject* ways = steps.is_none() ? nullptr : steps.ptr();
        fill(memory.data(), at, numbers.ptr(), ways, times);
        if (at != parameters_.size()) throw nb::value_error("Launch.run(): too few numbers");
        std::size_t bytes = bytes_;
        void* extra[] = {kPointer, memory.data(), kSize, &bytes, nullptr};
        int code;
        {
            const PatientRelease others;  // a full queue makes this wait
            // In a thread that never spoke to the GPU no context is current.
            Context now = nullptr;
            if (which_(&now) == 0 && !now) choose_(context_);
            code = start_(function_, wide, high, 1, threads_, 1, 1, shared_, reinterpret_cast<Stream>(stream), nullptr,
                          extra);
        }
        if (code != 0) throw std::runtime_error("the CUDA driver cannot start a kernel: error " + std::to_string(code));
    }

private:
    template <class Call>
    static Call find(const char* driver, const char* name) {
        void* library = dlopen(driver, RTLD_LAZY | RTLD_LOCAL);
        void* call = library ? dlsym(library, name) : nullptr;
        if (!call) throw nb::value_error("Launch(): no CUDA driver that tells a kernel's parameters");
        return reinterpret_cast<Call>(call);
    }

    void fill(std::byte* memory, std::size_t& at, PyObject* numbers, PyObject* steps, std::int64_t times) const {
        if (!PyTuple_Check(numbers)) throw nb::type_error("Launch.run(): expected a tuple of numbers");
        const Py_ssize_t count = PyTuple_GET_SIZE(numbers);
        if (steps && (!PyTuple_Check(steps) || PyTuple_GET_SIZE(steps) != count))
            throw nb::value_error("Launch.run(): steps of another shape");
        for (Py_ssize_t i = 0; i < count; ++i) {
            PyObject* number = PyTuple_GET_ITEM(numbers, i);
            PyObject* step = steps ? PyTuple_GET_ITEM(steps, i) : nullptr;
            if (PyTuple_Check(number)) {
                fill(memory, at, number, step, times);
                continue;
            }
            std::int64_t value = read(number);
            if (step) value += times * read(step);
            if (at == parameters_.size()) throw nb::value_error("Launch.run(): too many numbers");
            const Parameter to = parameters_[at++];
            const auto narrow = static_cast<std::int32_t>(value);
            if (to.bytes == 4 && narrow != value) throw nb::value_error("Launch.run(): a number is too large");
            if (to.bytes == 4)
                std::memcpy(memory + to.offset, &narrow, 4);
            else
                std::memcpy(memory + to.offset, &value, 8);
        }
    }

    static std::int64_t read(PyObject* number) {
        const long long value = PyLong_AsLongLong(number);
        if (value == -1 && PyErr_Occurred()) throw nb::python_error();
        return value;
    }

    Function function_;
    unsigned threads_, shared_;
    Start start_ = nullptr;
    Which which_ = nullptr;
    Choose choose_ = nullptr;
    Context context_ = nullptr;
    std::vector<Parameter> parameters_;
    std::size_t bytes_ = 0;
};

}  // namespace

void bind_launch(nb::module_& m) {
    nb::class_<Launch>(m, "Launch")
        .def(nb::init<std::uintptr_t, unsigned, unsigned, std::size_t, const char*>(), nb::arg("function"),
             nb::arg("threads"), nb::arg("shared"), nb::arg("numbers"), nb::arg("driver") = "libcuda.so.1")
        .def("run", &Launch::run, nb::arg("stream"), nb::arg("wide"), nb::arg("high"), nb::arg("numbers"),
             nb::arg("steps") = nb::none(), nb::arg("times") = 0);
}
