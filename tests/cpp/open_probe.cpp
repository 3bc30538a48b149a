// A C++ program at the other end of a pipe: tests in Python tell it, line by line, what to call on a buffer, and
// compare what it answers with their own. Bytes are hexadecimal, so that they are compared exactly.
//
//     open ADDRESS [TIMEOUT [KEYS]]
//     add NAME=HEX ...        rows by field; NAME=HEX@2,0,1 has the lengths of a ragged field
//     sample N [TIMEOUT]      one line for each array: name, dtype, shape, bytes; or 'ragged' and the bytes of each
//     example update HEX HEX          int64 indices, float32 priorities size | stats NAME | clear | flush | close
//
// Every answer ends with a line "done", or is one line "error KIND MESSAGE".
#include <sharpwave/buffer.h>

#include <cstring>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Bytes = std::vector<std::byte>;

Bytes from_hex(const std::string& text) {
    Bytes bytes(text.size() / 2);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        bytes[i] = static_cast<std::byte>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
    }
    return bytes;
}

std::string to_hex(std::span<const std::byte> bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (const std::byte byte : bytes) {
        text.push_back(kDigits[static_cast<unsigned>(byte) >> 4]);
        text.push_back(kDigits[static_cast<unsigned>(byte) & 15]);
    }
    return text.empty() ? "-" : text;
}

template <class T>
std::span<const T> as(const Bytes& bytes) {
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
}

void add(sharpwave::Buffer& buffer, std::istringstream& words, std::optional<double> timeout_s) {
    std::vector<Bytes> values;
    std::vector<std::string> names;
    std::vector<std::optional<std::vector<std::size_t>>> lengths;
    for (std::string word; words >> word;) {
        const std::size_t at = word.find('='), cut = word.find('@');
        names.push_back(word.substr(0, at));
        values.push_back(from_hex(word.substr(at + 1, cut == std::string::npos ? cut : cut - at - 1)));
        lengths.emplace_back();
        if (cut == std::string::npos) continue;
        lengths.back().emplace();
        std::istringstream numbers(word.substr(cut + 1));
        for (std::string number; std::getline(numbers, number, ',');) lengths.back()->push_back(std::stoul(number));
    }
    std::vector<sharpwave::Given> given;
    for (std::size_t i = 0; i < names.size(); ++i) {
        if (names[i] == "truncated" || names[i] == "mask") {
            given.push_back({names[i], as<bool>(values[i])});
        } else if (names[i] == "priority") {
            given.push_back({names[i], as<float>(values[i])});
        } else if (lengths[i]) {
            given.push_back({names[i], sharpwave::Value(values[i], *lengths[i])});
        } else {
            given.push_back({names[i], values[i]});
        }
    }
    buffer.add(given, timeout_s);
}

void tell(const sharpwave::Batch& batch) {
    for (const sharpwave::Batch::Array& array : batch.arrays()) {
        std::cout << array.name << ' ' << array.dtype << ' ';
        for (std::size_t i = 0; i < array.shape.size(); ++i) std::cout << (i ? "," : "") << array.shape[i];
        if (!array.is_ragged) {
            std::cout << ' ' << to_hex(batch.get<std::byte>(array.name)) << '\n';
            continue;
        }
        std::cout << " ragged";
        for (std::size_t i = 0; i < array.lengths.size(); ++i) {
            std::cout << ' ' << to_hex(batch.get<std::byte>(array.name, i));
        }
        std::cout << '\n';
    }
}

}  // namespace

int main() {
    std::optional<sharpwave::Buffer> buffer;
    double wait_s = -1;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string verb, address;
        words >> verb;
        try {
            if (verb == "open") {
                double timeout_s = 10;
                std::string keys;
                words >> address >> timeout_s >> keys;
                buffer.reset();
                buffer.emplace(sharpwave::open(address, {.timeout_s = timeout_s, .keys = keys}));
            } else if (verb == "timeout") {
                wait_s = -1;
                words >> wait_s;
            } else if (verb == "add") {
                add(*buffer, words, wait_s < 0 ? std::nullopt : std::optional(wait_s));
            } else if (verb == "sample") {
                std::size_t count = 0;
                double timeout_s = 10;
                words >> count >> timeout_s;
                tell(buffer->sample(count, timeout_s));
            } else if (verb == "update") {
                std::string indices, priorities;
                words >> indices >> priorities;
                const Bytes rows = from_hex(indices), values = from_hex(priorities);
                const sharpwave::Updated done = buffer->update_priorities(as<std::int64_t>(rows), as<float>(values));
                std::cout << done.applied << ' ' << done.stale << '\n';
            } else if (verb == "size") {
                std::cout << buffer->size() << '\n';
            } else if (verb == "stats") {
                std::string name;
                words >> name;
                std::cout << buffer->stats().at(name) << '\n';
            } else if (verb == "clear") {
                buffer->clear();
            } else if (verb == "flush") {
                buffer->flush();
            } else if (verb == "close") {
                buffer->close();
            }
            std::cout << "done" << std::endl;
        } catch (const sharpwave::Error& error) {
            std::cout << "error " << static_cast<int>(error.kind()) << ' ' << error.what() << std::endl;
        }
    }
}
