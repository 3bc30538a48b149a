#include "buffer/address.h"

#include <filesystem>
#include <system_error>

#include "base/error.h"
#include "storage/storage.h"

namespace sharpwave {

std::string path_of(const std::string& address) {
    if (address.starts_with("shm://")) {
        const std::string name = address.substr(6);
        const auto is_allowed = [](char mark) {
            return (mark >= 'a' && mark <= 'z') || (mark >= 'A' && mark <= 'Z') || (mark >= '0' && mark <= '9') ||
                   mark == '_' || mark == '.' || mark == '-';
        };
        bool fits = !name.empty() && name.size() <= 200;
        for (const char mark : name) fits = fits && is_allowed(mark);
        if (!fits) {
            throw Error(ErrorKind::storage,
                        "open(): expected a name of letters, digits, '_', '.', '-' after shm://, got '" + name + "'");
        }
        return shared_memory_folder() + "/sharpwave-" + name + ".sw";
    }
    if (address.starts_with("file://")) {
        const std::string path = address.substr(7);
        if (path.empty())
            throw Error(ErrorKind::storage, "open(): expected a path after file://, got '" + address + "'");
        std::error_code failed;
        const std::filesystem::path whole = std::filesystem::absolute(path, failed);
        if (failed) {
            throw Error(ErrorKind::storage,
                        "open(): '" + address + "' is relative to a folder that is gone: " + failed.message());
        }
        return whole.string();
    }
    throw Error(ErrorKind::storage, "open(): expected 'shm://name' or 'file://path', got '" + address + "'");
}

}  // namespace sharpwave
