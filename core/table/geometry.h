// From a configuration to the places of all regions, and back from a file's header with every number checked.
#pragma once

#include <string>

#include "schema/schema.h"
#include "storage/format.h"

namespace sharpwave {

struct TableConfig;

// Chooses block size and region offsets. Sizes that cannot be are ErrorKind::schema.
format::Header plan(const TableConfig& config, const RowLayout& layout);

// Where the part begins that gets its space as it fills.
std::uint64_t sparse_offset(const format::Header& header);

// Writes header, fields, description and starting records into zeroed bytes.
void write_plan(std::byte* base, const format::Header& header, const TableConfig& config, const RowLayout& layout);

// Reads a header that may come from anywhere: foreign, newer, truncated or damaged ones are ErrorKind::storage.
// Afterwards every region lies inside the header's total_bytes, which are `bytes` unless the file may_be_shorter.
format::Header check_header(const std::byte* base, std::uint64_t bytes, const std::string& path,
                            bool may_be_shorter = false);

// The fields, as they stand in the file; checked against the header.
RowLayout read_layout(const std::byte* base, const format::Header& header, const std::string& path);

std::uint32_t header_checksum(const format::Header& header);
std::uint32_t schema_checksum(const std::byte* base, const format::Header& header);

}  // namespace sharpwave
