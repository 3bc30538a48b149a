#include "buffer/remote.h"

#include "base/error.h"

namespace sharpwave {

bool is_remote(const std::string& address) { return address.starts_with("tcp://") || address.starts_with("ipc://"); }

std::shared_ptr<BufferRows> open_remote(const std::string& address, const OpenOptions& options, Deadline deadline) {
    if (!sharpwave_net_open) {
        throw Error(ErrorKind::storage, "open(): '" + address +
                                            "': this program is not linked against the component for the network; link "
                                            "the CMake target sharpwave::net (find_package(sharpwave COMPONENTS net))");
    }
    std::shared_ptr<BufferRows> rows;
    sharpwave_net_open(address, options, deadline, rows);
    return rows;
}

}  // namespace sharpwave
