#include "base/json.h"

#include <charconv>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace sharpwave::json {
namespace {

constexpr const char* kNames[] = {"null",     "a truth value", "a whole number", "a number",
                                  "a string", "a list",        "an object"};

[[noreturn]] void fail(const std::string& what) { throw Error(ErrorKind::storage, "JSON: " + what); }

}  // namespace

void Value::refuse(std::string_view where, std::string_view expected) const {
    fail(std::string(where) + ": expected " + std::string(expected) + ", got " + kNames[static_cast<int>(kind_)]);
}

bool Value::truth(std::string_view where) const {
    if (kind_ != Kind::truth) refuse(where, "a truth value");
    return truth_;
}

std::int64_t Value::whole(std::string_view where, std::int64_t least, std::int64_t most) const {
    if (kind_ != Kind::whole) refuse(where, "a whole number");
    if (whole_ < least || whole_ > most) {
        fail(std::string(where) + ": expected " + std::to_string(least) + " to " + std::to_string(most) + ", got " +
             std::to_string(whole_));
    }
    return whole_;
}

double Value::number(std::string_view where) const {
    if (kind_ == Kind::whole) return static_cast<double>(whole_);
    if (kind_ != Kind::real) refuse(where, "a number");
    return real_;
}

const std::string& Value::text(std::string_view where) const {
    if (kind_ != Kind::text) refuse(where, "a string");
    return text_;
}

const std::vector<Value>& Value::list(std::string_view where) const {
    if (kind_ != Kind::list) refuse(where, "a list");
    return list_;
}

const std::vector<std::pair<std::string, Value>>& Value::object(std::string_view where) const {
    if (kind_ != Kind::object) refuse(where, "an object");
    return object_;
}

const Value* Value::find(std::string_view name) const {
    if (kind_ != Kind::object) return nullptr;
    for (const auto& [key, value] : object_) {
        if (key == name) return &value;
    }
    return nullptr;
}

const Value& Value::at(std::string_view name, std::string_view where) const {
    if (kind_ != Kind::object) refuse(where, "an object");
    const Value* found = find(name);
    if (!found) fail(std::string(where) + ": expected a member '" + std::string(name) + "', got none");
    return *found;
}

class Reader {
public:
    Reader(std::string_view document, bool infinite) : text_(document), infinite_(infinite) {}

    Value document() {
        Value value = read(0);
        skip_space();
        if (at_ != text_.size()) wrong("the end");
        return value;
    }

private:
    [[noreturn]] void wrong(const std::string& expected) const {
        fail("byte " + std::to_string(at_) + ": expected " + expected);
    }

    void skip_space() {
        while (at_ < text_.size() &&
               (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '\r')) {
            ++at_;
        }
    }

    bool take(std::string_view word) {
        if (text_.substr(at_, word.size()) != word) return false;
        at_ += word.size();
        return true;
    }

    void expect(char mark) {
        if (at_ >= text_.size() || text_[at_] != mark) wrong(std::string("'") + mark + "'");
        ++at_;
    }

    Value read(int depth) {
        if (depth > kMostDepth) wrong("at most " + std::to_string(kMostDepth) + " levels");
        skip_space();
        if (at_ >= text_.size()) wrong("a value");
        Value value;
        switch (text_[at_]) {
            case '{':
                read_object(value, depth);
                break;
            case '[':
                read_list(value, depth);
                break;
            case '"':
                value.kind_ = Value::Kind::text;
                value.text_ = read_text();
                break;
            case 't':
            case 'f':
                value.kind_ = Value::Kind::truth;
                value.truth_ = text_[at_] == 't';
                if (!take(value.truth_ ? "true" : "false")) wrong("a value");
                break;
            case 'n':
                if (!take("null")) wrong("a value");
                break;
            default:
                read_number(value);
        }
        return value;
    }

    void read_object(Value& value, int depth) {
        value.kind_ = Value::Kind::object;
        ++at_;
        skip_space();
        if (at_ < text_.size() && text_[at_] == '}') {
            ++at_;
            return;
        }
        for (;;) {
            skip_space();
            if (at_ >= text_.size() || text_[at_] != '"') wrong("a name in quotes");
            std::string name = read_text();
            if (value.object_.size() >= kMostMembers) wrong("at most " + std::to_string(kMostMembers) + " members");
            if (value.find(name)) wrong("each name once, got '" + name + "' twice");
            skip_space();
            expect(':');
            value.object_.emplace_back(std::move(name), read(depth + 1));
            skip_space();
            if (at_ < text_.size() && text_[at_] == ',') {
                ++at_;
                continue;
            }
            expect('}');
            return;
        }
    }

    void read_list(Value& value, int depth) {
        value.kind_ = Value::Kind::list;
        ++at_;
        skip_space();
        if (at_ < text_.size() && text_[at_] == ']') {
            ++at_;
            return;
        }
        for (;;) {
            value.list_.push_back(read(depth + 1));
            skip_space();
            if (at_ < text_.size() && text_[at_] == ',') {
                ++at_;
                continue;
            }
            expect(']');
            return;
        }
    }

    bool take_digits() {
        const std::size_t start = at_;
        while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
        return at_ > start;
    }

    void read_number(Value& value) {
        const std::size_t start = at_;
        const bool is_negative = take("-");
        if (infinite_ && take("Infinity")) {
            value.kind_ = Value::Kind::real;
            value.real_ =
                is_negative ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity();
            return;
        }
        const bool is_zero = at_ < text_.size() && text_[at_] == '0';
        if (!take_digits()) wrong("a value");
        if (is_zero && at_ - start > (is_negative ? 2u : 1u)) wrong("a number without leading zeros");
        bool is_whole = true;
        if (take(".")) {
            is_whole = false;
            if (!take_digits()) wrong("digits after '.'");
        }
        if (take("e") || take("E")) {
            is_whole = false;
            if (!take("+")) take("-");
            if (!take_digits()) wrong("digits of an exponent");
        }
        const char* const first = text_.data() + start;
        const char* const last = text_.data() + at_;
        value.kind_ = is_whole ? Value::Kind::whole : Value::Kind::real;
        const std::from_chars_result read =
            is_whole ? std::from_chars(first, last, value.whole_) : std::from_chars(first, last, value.real_);
        if (read.ec != std::errc() || read.ptr != last || (!is_whole && !std::isfinite(value.real_))) {
            at_ = start;
            wrong("a number that 64 bits can hold");
        }
    }

    unsigned read_hex() {
        unsigned code = 0;
        if (text_.size() - at_ < 4) wrong("four hexadecimal digits");
        const char* const first = text_.data() + at_;
        const std::from_chars_result read = std::from_chars(first, first + 4, code, 16);
        if (read.ec != std::errc() || read.ptr != first + 4) wrong("four hexadecimal digits");
        at_ += 4;
        return code;
    }

    static void put_utf8(std::string& to, unsigned code) {
        const auto put = [&](unsigned byte) { to.push_back(static_cast<char>(byte)); };
        if (code < 0x80) return put(code);
        if (code < 0x800) {
            put(0xc0 | code >> 6);
        } else {
            if (code < 0x10000) {
                put(0xe0 | code >> 12);
            } else {
                put(0xf0 | code >> 18);
                put(0x80 | (code >> 12 & 0x3f));
            }
            put(0x80 | (code >> 6 & 0x3f));
        }
        put(0x80 | (code & 0x3f));
    }

    // One character of several bytes: the shortest form of a code that exists.
    void read_utf8(std::string& to) {
        const auto lead = static_cast<unsigned char>(text_[at_]);
        const int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
        unsigned code = lead & (more == 3 ? 0x07u : more == 2 ? 0x0fu : 0x1fu);
        bool is_right = lead >= 0xc2 && lead <= 0xf4 && text_.size() - at_ > static_cast<std::size_t>(more);
        for (int i = 1; is_right && i <= more; ++i) {
            const auto byte = static_cast<unsigned char>(text_[at_ + static_cast<std::size_t>(i)]);
            is_right = (byte & 0xc0) == 0x80;
            code = code << 6 | (byte & 0x3f);
        }
        constexpr unsigned kLeast[] = {0x80, 0x800, 0x10000};
        if (!is_right || code < kLeast[more - 1] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) {
            wrong("UTF-8");
        }
        to.append(text_.substr(at_, static_cast<std::size_t>(more) + 1));
        at_ += static_cast<std::size_t>(more) + 1;
    }

    void read_escape(std::string& to) {
        if (at_ >= text_.size()) wrong("an escape");
        constexpr std::string_view kMarks = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
        const char mark = text_[at_];
        if (const std::size_t found = kMarks.find(mark); found != std::string_view::npos) {
            ++at_;
            to.push_back(kMeant[found]);
            return;
        }
        if (mark != 'u') wrong("an escape");
        ++at_;
        unsigned code = read_hex();
        if (code >= 0xd800 && code < 0xdc00) {
            if (!take("\\u")) wrong("the second half of a pair");
            const unsigned low = read_hex();
            if (low < 0xdc00 || low >= 0xe000) wrong("the second half of a pair");
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        } else if (code >= 0xdc00 && code < 0xe000) {
            wrong("the first half of a pair");
        }
        put_utf8(to, code);
    }

    std::string read_text() {
        std::string read;
        ++at_;
        for (;;) {
            if (at_ >= text_.size()) wrong("'\"'");
            const auto next = static_cast<unsigned char>(text_[at_]);
            if (next == '"') {
                ++at_;
                return read;
            }
            if (next < 0x20) wrong("no control character");
            if (next == '\\') {
                ++at_;
                read_escape(read);
            } else if (next < 0x80) {
                read.push_back(text_[at_++]);
            } else {
                read_utf8(read);
            }
        }
    }

    std::string_view text_;
    std::size_t at_ = 0;
    bool infinite_;
};

Value parse(std::string_view document, bool infinite) {
    if (document.size() > kMostBytes) {
        fail("expected at most " + std::to_string(kMostBytes) + " bytes, got " + std::to_string(document.size()));
    }
    return Reader(document, infinite).document();
}

std::string quoted(std::string_view text) {
    std::string quoted = "\"";
    for (const char mark : text) {
        if (mark == '"' || mark == '\\') quoted.push_back('\\');
        if (static_cast<unsigned char>(mark) < 0x20) {
            constexpr char kDigits[] = "0123456789abcdef";
            quoted += "\\u00";
            quoted.push_back(kDigits[mark >> 4]);
            quoted.push_back(kDigits[mark & 15]);
        } else {
            quoted.push_back(mark);
        }
    }
    return quoted + '"';
}

}  // namespace sharpwave::json
