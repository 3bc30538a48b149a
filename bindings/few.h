// An array that needs no allocation while it is short.
#pragma once

#include <cstddef>
#include <memory>

template <class Item, std::size_t Inline = 16>
class Few {
public:
    explicit Few(std::size_t size) : size_(size) {
        if (size > Inline) heap_ = std::make_unique<Item[]>(size);
    }
    Item* data() { return heap_ ? heap_.get() : inline_; }
    Item& operator[](std::size_t i) { return data()[i]; }
    std::size_t size() const { return size_; }

private:
    std::size_t size_;
    Item inline_[Inline];
    std::unique_ptr<Item[]> heap_;
};
