// Runs the fuzz target without libFuzzer: over every file of the folders given, as it is and changed so many times;
// then, for so many seconds, over files changed at random.
//
//     sharpwave_fuzz [--changes 200] [--seconds 60] [--seed 1] corpus...
//
// When it dies, the file that it died of lies in the working folder as `crash.sw`, and `sharpwave_fuzz crash.sw` dies
// of it again.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>

#include "fuzz_open.h"

namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr unsigned kPatienceS = 20;  // for files of a few kilobytes, sanitized, on a loaded machine
constexpr std::size_t kMostBytes = 1 << 20;

Bytes contents(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// Ends the process where it hangs: with ASAN_OPTIONS=handle_abort=1 the sanitizer tells where that is.
void give_up(int) {
    constexpr char kWords[] = "a run hangs\n";
    if (write(STDERR_FILENO, kWords, sizeof kWords - 1) >= 0) std::abort();
}

// Written before the run: whatever ends the process, the file is there.
void run(const Bytes& bytes) {
    std::ofstream("crash.sw", std::ios::binary | std::ios::trunc)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    alarm(kPatienceS);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    alarm(0);
}

}  // namespace

int main(int argc, char** argv) {
    std::uint64_t changes = 0, seconds = 0, seed = 1;
    std::vector<std::filesystem::path> paths;
    bool is_corpus = false;
    signal(SIGALRM, give_up);
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        std::uint64_t* number = name == "--changes"   ? &changes
                                : name == "--seconds" ? &seconds
                                : name == "--seed"    ? &seed
                                                      : nullptr;
        if (number && i + 1 < argc) {
            *number = std::strtoull(argv[++i], nullptr, 10);
        } else if (std::filesystem::is_directory(name)) {
            for (const auto& entry : std::filesystem::directory_iterator(name)) paths.push_back(entry.path());
            is_corpus = true;  // whole files; those given by name may be damaged
        } else {
            paths.emplace_back(name);
        }
    }
    std::sort(paths.begin(), paths.end());
    std::vector<Bytes> corpus;
    for (const auto& path : paths) {
        corpus.push_back(contents(path));
        Bytes mended = corpus.back();
        sharpwave::fuzz::mend_checksums(mended);
        if (is_corpus && mended != corpus.back()) {
            std::fprintf(stderr, "%s: mutate.cpp makes other checksums; write the corpus anew\n", path.c_str());
            return 1;
        }
        run(corpus.back());
        for (std::uint64_t change = 0; change < changes; ++change) {
            Bytes bytes = corpus.back();
            sharpwave::fuzz::mutate(bytes, seed * 1'000'000 + change);
            run(bytes);
        }
    }
    if (corpus.empty()) {
        std::fprintf(stderr, "sharpwave_fuzz: expected files or folders\n");
        return 2;
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    std::mt19937_64 random(seed);
    std::uint64_t runs = 0;
    for (; seconds && std::chrono::steady_clock::now() < end; ++runs) {
        Bytes bytes = corpus[random() % corpus.size()];
        for (std::uint64_t rounds = 1 + random() % 3; rounds > 0; --rounds) sharpwave::fuzz::mutate(bytes, random());
        if (bytes.size() <= kMostBytes) run(bytes);
    }
    std::filesystem::remove("crash.sw");
    std::printf("%zu files, %llu changes each, %llu more at random: survived\n", corpus.size(),
                static_cast<unsigned long long>(changes), static_cast<unsigned long long>(runs));
    return 0;
}
