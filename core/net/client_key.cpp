#include "net/client_key.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "base/crc32c.h"
#include "base/error.h"

namespace sharpwave::net {
namespace {

constexpr std::string_view kTitle = "# Sharpwave client key, format 1. ";
constexpr std::size_t kMostBytes = 1 << 16, kKeyBytes = 40;

struct Opened {
    int number;
    ~Opened() {
        if (number >= 0) ::close(number);
    }
};

[[noreturn]] void refuse_key(const std::string& path, const std::string& what) {
    throw Error(ErrorKind::storage, "open(): keys: '" + path + "' " + what);
}

std::string read_own(const std::string& path) {
    const Opened file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)};
    if (file.number < 0 && errno == ELOOP) refuse_key(path, "is a symbolic link; give the file itself");
    if (file.number < 0) refuse_key(path, std::string("cannot be read: ") + std::strerror(errno));
    struct stat info;
    if (fstat(file.number, &info) != 0 || !S_ISREG(info.st_mode)) refuse_key(path, "is not a file");
    if (info.st_uid != geteuid()) refuse_key(path, "belongs to another user; copy it as this user");
    if (info.st_mode & 077) refuse_key(path, "can be read by other users; run: chmod 600 '" + path + "'");
    std::string text(kMostBytes, '\0');
    const ssize_t got = ::read(file.number, text.data(), text.size());
    if (got < 0) refuse_key(path, std::string("cannot be read: ") + std::strerror(errno));
    text.resize(static_cast<std::size_t>(got));
    return text;
}

}  // namespace

ClientKey ClientKey::read(const std::string& path) {
    const std::string text = read_own(path);
    if (!text.starts_with(kTitle)) refuse_key(path, "is not a Sharpwave client key of format 1");
    const std::size_t cut = text.rfind("check = ");
    char check[32] = "";
    if (cut != std::string::npos) {
        std::snprintf(check, sizeof check, "check = %08x\n", crc32c(0, text.data(), cut));
    }
    if (cut == std::string::npos || text.substr(cut) != check) {
        refuse_key(path, "is damaged: its checksum is wrong or missing; make another by 'sharpwave keys new'");
    }
    const auto value_of = [&](const std::string& name) {
        const std::string start = "\n" + name + " = ";
        const std::size_t at = text.find(start);
        const std::size_t end = at == std::string::npos ? at : text.find('\n', at + 1);
        const std::string value =
            end == std::string::npos ? "" : text.substr(at + start.size(), end - at - start.size());
        if (value.size() != kKeyBytes)
            refuse_key(path, "has no " + name + " key; make another by 'sharpwave keys new'");
        return value;
    };
    return {value_of("public"), value_of("secret"), value_of("server")};
}

}  // namespace sharpwave::net
