#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "base/error.h"
#include "base/json.h"

using namespace sharpwave;

namespace {

std::string refusal(const std::string& document, bool infinite = false) {
    try {
        json::parse(document, infinite);
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::storage);
        return error.what();
    }
    return "accepted";
}

}  // namespace

TEST(Json, ReadsEveryKindOfValue) {
    const json::Value read = json::parse(
        R"( {"a": [1, -2.5e3, true, false, null, "x\n\"\u00e4\ud83d\ude00é"], "b": {}, "c": [], "whole": 9223372036854775807} )");
    const std::vector<json::Value>& list = read.at("a", "test").list("a");
    EXPECT_EQ(list[0].whole("a", 0, 1), 1);
    EXPECT_EQ(list[0].number("a"), 1.0);
    EXPECT_EQ(list[1].number("a"), -2500.0);
    EXPECT_TRUE(list[2].truth("a"));
    EXPECT_FALSE(list[3].truth("a"));
    EXPECT_TRUE(list[4].is_null());
    EXPECT_EQ(list[5].text("a"), "x\n\"ä😀é");
    EXPECT_TRUE(read.at("b", "test").object("b").empty());
    EXPECT_TRUE(read.at("c", "test").list("c").empty());
    EXPECT_EQ(read.at("whole", "test").whole("whole", 0, INT64_MAX), INT64_MAX);
    EXPECT_EQ(read.object("test")[1].first, "b");  // in the order of the document
    EXPECT_EQ(read.find("none"), nullptr);
    EXPECT_EQ(json::parse(json::quoted("a\"\\\n\x01é")).text("quoted"), "a\"\\\n\x01é");
}

TEST(Json, ReadsInfinityOnlyWhereItIsAskedFor) {
    const json::Value read = json::parse("[Infinity, -Infinity]", true);
    EXPECT_EQ(read.list("")[0].number(""), INFINITY);
    EXPECT_EQ(read.list("")[1].number(""), -INFINITY);
    EXPECT_EQ(refusal("[Infinity]"), "JSON: byte 1: expected a value");
    EXPECT_NE(refusal("[NaN]", true), "accepted");
}

TEST(Json, RefusesEverythingElse) {
    for (const char* const bad : {"",
                                  " ",
                                  "{",
                                  "}",
                                  "[",
                                  "[1",
                                  "[1,",
                                  "[1,]",
                                  "[,1]",
                                  "{\"a\"}",
                                  "{\"a\":}",
                                  "{\"a\":1,}",
                                  "{a:1}",
                                  "{'a':1}",
                                  "01",
                                  "-01",
                                  "1.",
                                  ".5",
                                  "+1",
                                  "1e",
                                  "1e+",
                                  "--1",
                                  "- 1",
                                  "0x1",
                                  "tru",
                                  "nul",
                                  "True",
                                  "None",
                                  "1 2",
                                  "\"",
                                  "\"\\\"",
                                  "\"\\x\"",
                                  "\"\\u12\"",
                                  "\"\\u12g4\"",
                                  "\"\\ud800\"",
                                  "\"\\ud800\\u0041\"",
                                  "\"\\udc00\"",
                                  "\"a\nb\"",
                                  "// c\n1",
                                  "{\"a\":1,\"a\":2}",
                                  "\"\xff\"",
                                  "\"\xc0\x80\"",
                                  "\"\xed\xa0\x80\"",
                                  "\"\xf5\x80\x80\x80\"",
                                  "\"\xe2\x82\"",
                                  "9223372036854775808",
                                  "-9223372036854775809",
                                  "1e999",
                                  "[1]]",
                                  "nullnull"}) {
        EXPECT_NE(refusal(bad), "accepted") << bad;
    }
    EXPECT_NE(refusal(std::string("1\0", 2)), "accepted");
    EXPECT_EQ(refusal("{\"a\":1,\"a\":2}"), "JSON: byte 10: expected each name once, got 'a' twice");
}

TEST(Json, LimitsDepthAndSize) {
    const auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
    EXPECT_EQ(refusal(nested(json::kMostDepth)), "accepted");
    EXPECT_NE(refusal(nested(json::kMostDepth + 2)), "accepted");
    EXPECT_NE(refusal(std::string(1'000'000, '[')), "accepted");
    EXPECT_NE(refusal("\"" + std::string(json::kMostBytes, 'a') + "\""), "accepted");
    std::string wide = "{\"0\":0";
    for (std::size_t i = 1; i <= json::kMostMembers; ++i) wide += ",\"" + std::to_string(i) + "\":0";
    EXPECT_NE(refusal(wide + "}"), "accepted");
}

TEST(Json, SaysWhatWasExpectedOfAValue) {
    const json::Value read = json::parse("{\"a\": 1.5, \"b\": 7}");
    const auto message = [](auto call) {
        try {
            call();
        } catch (const Error& error) {
            return std::string(error.what());
        }
        return std::string("accepted");
    };
    EXPECT_EQ(message([&] { read.at("a", "test").whole("a", 0, 1); }),
              "JSON: a: expected a whole number, got a number");
    EXPECT_EQ(message([&] { read.at("b", "test").whole("b", 0, 5); }), "JSON: b: expected 0 to 5, got 7");
    EXPECT_EQ(message([&] { read.at("c", "test"); }), "JSON: test: expected a member 'c', got none");
    EXPECT_EQ(message([&] { read.text("all"); }), "JSON: all: expected a string, got an object");
}
