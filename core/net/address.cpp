#include "net/address.h"

#include <algorithm>

#include "base/error.h"

namespace sharpwave::net {

Session::Place read_address(const std::string& address, const std::string& keys) {
    const std::string kind = address.substr(0, 6);
    const std::size_t cut = address.rfind('/');
    const std::string name = address.substr(cut + 1);
    const std::string endpoint = address.substr(0, std::max(cut, kind.size()));
    const std::string rest = endpoint.substr(kind.size());
    const auto is_allowed = [](char mark) {
        return (mark >= 'a' && mark <= 'z') || (mark >= 'A' && mark <= 'Z') || (mark >= '0' && mark <= '9') ||
               mark == '_' || mark == '.' || mark == '-';
    };
    bool fits =
        cut > kind.size() && !name.empty() && name.size() <= 200 && std::all_of(name.begin(), name.end(), is_allowed);
    if (kind == "tcp://") {
        const std::size_t colon = rest.rfind(':');
        const std::string port = colon == std::string::npos ? "" : rest.substr(colon + 1);
        fits = fits && colon > 0 && !port.empty() && port.size() <= 5 && rest.find('/') == std::string::npos &&
               std::all_of(port.begin(), port.end(), [](char mark) { return mark >= '0' && mark <= '9'; });
    } else {
        fits = fits && rest.starts_with('/');
    }
    if (!fits) {
        throw Error(ErrorKind::storage, "open(): expected 'tcp://host:port/name' or 'ipc:///path/name', got '" +
                                            address + "'; the name of the table comes last");
    }
    Session::Place place{endpoint, name, address, std::nullopt};
    if (!keys.empty()) place.key = ClientKey::read(keys);
    return place;
}

}  // namespace sharpwave::net
