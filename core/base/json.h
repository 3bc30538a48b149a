// A strict JSON reader for small documents that may come from a damaged file or from a stranger: what a table says
// about itself, what a server answers. Every byte is checked; what is wrong is ErrorKind::storage and says at which
// byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sharpwave::json {

inline constexpr std::size_t kMostBytes = 1 << 24;
inline constexpr int kMostDepth = 64;
inline constexpr std::size_t kMostMembers = 4096;  // of one object: each name is compared with those before it

// A value of a document. The readers below throw where it is of another kind; `where` is told in the message.
class Value {
public:
    enum class Kind : std::uint8_t { null, truth, whole, real, text, list, object };

    Kind kind() const { return kind_; }
    bool is_null() const { return kind_ == Kind::null; }
    bool is_text() const { return kind_ == Kind::text; }
    bool is_list() const { return kind_ == Kind::list; }
    bool is_object() const { return kind_ == Kind::object; }
    bool is_number() const { return kind_ == Kind::whole || kind_ == Kind::real; }

    bool truth(std::string_view where) const;
    // Written without a fraction or an exponent, and in these bounds.
    std::int64_t whole(std::string_view where, std::int64_t least, std::int64_t most) const;
    double number(std::string_view where) const;  // whole numbers too
    const std::string& text(std::string_view where) const;
    const std::vector<Value>& list(std::string_view where) const;
    // Members in the order of the document. No name comes twice.
    const std::vector<std::pair<std::string, Value>>& object(std::string_view where) const;

    // A member of an object; at() throws where there is none, find() gives null.
    const Value& at(std::string_view name, std::string_view where) const;
    const Value* find(std::string_view name) const;

private:
    friend class Reader;
    [[noreturn]] void refuse(std::string_view where, std::string_view expected) const;

    Kind kind_ = Kind::null;
    bool truth_ = false;
    std::int64_t whole_ = 0;
    double real_ = 0;
    std::string text_;
    std::vector<Value> list_;
    std::vector<std::pair<std::string, Value>> object_;
};

// One document and nothing behind it but white space. `infinite`: Infinity and -Infinity are numbers too, as Python's
// json writes them; NaN never is. The document is at most kMostBytes long and kMostDepth deep. Whole numbers fit into
// 64 bits, other numbers are finite.
Value parse(std::string_view document, bool infinite = false);

// The text of a JSON string, with its quotes.
std::string quoted(std::string_view text);

}  // namespace sharpwave::json
