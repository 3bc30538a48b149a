// The parts of the fuzzer: one run over some bytes, and changes to bytes that know what a table is made of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace sharpwave::fuzz {

// The bytes of a run are a file, or a snapshot and behind it the increment that stands beside it: how long the first
// is.
std::size_t length_of_first(const std::uint8_t* data, std::size_t size);

// Changes a file somewhere: a number of its header, of one of its regions, a length, a cut. Mostly the checksums are
// made to hold again, so that what stands behind them is reached.
void mutate(std::vector<std::uint8_t>& bytes, std::uint64_t seed);

// Makes the checksums of a file hold, as far as its regions lie within it.
void mend_checksums(std::vector<std::uint8_t>& bytes);

}  // namespace sharpwave::fuzz
