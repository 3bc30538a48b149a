#include "table/codec.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "base/error.h"

#if defined(SHARPWAVE_HAS_BLOSC2)
#include <blosc2.h>
#endif

namespace sharpwave {

#if defined(SHARPWAVE_HAS_BLOSC2)
namespace {

// Below this a header costs more than is saved.
constexpr std::uint32_t kLeastBytes = 64;

// A block this long finds nearly all that a longer one would, and still lies in the cache while it is unpacked.
constexpr std::uint32_t kMostBlockBytes = 256 * 1024;

struct Library {
    Library() { blosc2_init(); }  // never destroyed: threads may still decode while the process ends
};

void start_library() { [[gnu::used]] static const Library* library = new Library; }

// A context is not for two threads; one a thread and kind is made once and kept. blosc2 cuts a value into blocks, and a
// context left to choose keeps the smallest block it ever chose: a large value after a small one would be cut into
// crumbs. So the block is ours to say, by the value's size alone: the same value gives the same bytes always.
class Compressors {
public:
    ~Compressors() {
        for (KeptContext& kept : kept_) blosc2_free_ctx(kept.context);
    }
    blosc2_context* get(Codec codec, std::uint32_t item_bytes, std::uint32_t value_bytes) {
        const std::uint32_t block = std::min(std::bit_floor(value_bytes), kMostBlockBytes);
        for (const KeptContext& kept : kept_) {
            if (kept.codec == codec && kept.item_bytes == item_bytes && kept.block == block) return kept.context;
        }
        start_library();
        blosc2_cparams params = BLOSC2_CPARAMS_DEFAULTS;
        params.compcode = codec == Codec::lz4 ? BLOSC_LZ4 : BLOSC_ZSTD;
        params.clevel = codec == Codec::lz4 ? 5 : 3;
        params.typesize = static_cast<std::int32_t>(item_bytes <= 255 ? item_bytes : 1);
        params.blocksize = static_cast<std::int32_t>(block);
        params.nthreads = 1;
        std::memset(params.filters, 0, sizeof params.filters);
        if (item_bytes > 1) params.filters[BLOSC2_MAX_FILTERS - 1] = BLOSC_SHUFFLE;
        kept_.push_back({codec, item_bytes, block, blosc2_create_cctx(params)});
        return kept_.back().context;
    }

private:
    struct KeptContext {
        Codec codec;
        std::uint32_t item_bytes, block;
        blosc2_context* context;
    };
    std::vector<KeptContext> kept_;
};

class Decompressor {
public:
    Decompressor() {
        start_library();
        blosc2_dparams params = BLOSC2_DPARAMS_DEFAULTS;
        params.nthreads = 1;
        context_ = blosc2_create_dctx(params);
    }
    ~Decompressor() { blosc2_free_ctx(context_); }
    blosc2_context* get() { return context_; }

private:
    blosc2_context* context_;
};

}  // namespace

bool has_codecs() { return true; }

std::uint32_t encode(const Field& field, const std::byte* value, std::uint32_t bytes, std::byte* out) {
    if (field.codec != Codec::none && bytes >= kLeastBytes) {
        thread_local Compressors compressors;
        thread_local std::vector<std::byte> room;
        room.resize(bytes + BLOSC2_MAX_OVERHEAD);
        const int kept =
            blosc2_compress_ctx(compressors.get(field.codec, field.item_bytes, bytes), value,
                                static_cast<std::int32_t>(bytes), room.data(), static_cast<std::int32_t>(room.size()));
        if (kept < 0) throw Error(ErrorKind::storage, "field '" + field.name + "': the compressor failed");
        if (kept > 0 && static_cast<std::uint32_t>(kept) < bytes) {
            std::memcpy(out, room.data(), static_cast<std::size_t>(kept));
            return static_cast<std::uint32_t>(kept);
        }
    }
    std::memcpy(out, value, bytes);
    return bytes;
}

bool decode(const std::byte* kept, std::uint32_t kept_bytes, std::byte* out, std::uint32_t value_bytes) {
    if (kept_bytes == value_bytes) {
        std::memcpy(out, kept, value_bytes);
        return true;
    }
    if (kept_bytes < BLOSC_MIN_HEADER_LENGTH) return false;
    std::int32_t full = 0, compressed = 0;
    if (blosc2_cbuffer_sizes(kept, &full, &compressed, nullptr) < 0) return false;
    if (full != static_cast<std::int32_t>(value_bytes) || compressed != static_cast<std::int32_t>(kept_bytes))
        return false;
    thread_local Decompressor decompressor;
    return blosc2_decompress_ctx(decompressor.get(), kept, static_cast<std::int32_t>(kept_bytes), out,
                                 static_cast<std::int32_t>(value_bytes)) == static_cast<int>(value_bytes);
}

#else

bool has_codecs() { return false; }

std::uint32_t encode(const Field&, const std::byte* value, std::uint32_t bytes, std::byte* out) {
    std::memcpy(out, value, bytes);
    return bytes;
}

bool decode(const std::byte* kept, std::uint32_t kept_bytes, std::byte* out, std::uint32_t value_bytes) {
    if (kept_bytes != value_bytes) return false;
    std::memcpy(out, kept, value_bytes);
    return true;
}

#endif

}  // namespace sharpwave
