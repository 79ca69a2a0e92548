// A map from text to values that keeps the order in which keys came, as Python's dictionaries do. Checkpoints need this order.
#pragma once

#include <list>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "stretches.hpp"

namespace kv {

// Seeded, so that clients cannot choose names that collide.
struct TextHash {
    u64 seed = drawn_seed();
    std::size_t operator()(std::string_view text) const {
        u64 value = seed ^ text.size(), word = 0;
        for (; text.size() > sizeof word; text.remove_prefix(sizeof word)) {
            std::memcpy(&word, text.data(), sizeof word);
            value = mixed(value ^ word);
        }
        word = 0;
        std::memcpy(&word, text.data(), text.size());
        return static_cast<std::size_t>(mixed(value ^ word));
    }
};

template <typename Value>
class OrderedMap {
    using Entries = std::list<std::pair<const std::string, Value>>;

public:
    using Entry = typename Entries::const_iterator;

    OrderedMap() = default;
    OrderedMap(const OrderedMap&) = delete;
    OrderedMap& operator=(const OrderedMap&) = delete;

    std::size_t size() const { return entries_.size(); }
    bool empty() const { return entries_.empty(); }
    Value* find(std::string_view key) {
        const auto found = places_.find(key);
        return found == places_.end() ? nullptr : &found->second->second;
    }
    const Value* find(std::string_view key) const { return const_cast<OrderedMap*>(this)->find(key); }
    // Sets the key's value; a new key is the last one. The reference is valid until the key is erased.
    Value& put(std::string_view key, Value value) {
        Value* const known = find(key);
        return known == nullptr ? append(key, std::move(value)) : *known = std::move(value);
    }
    // Adds what `make` returns as the key's value, at the end; nullptr: the key had a value, which stays.
    template <typename Make>
    Value* add(std::string_view key, Make make) {
        return find(key) != nullptr ? nullptr : &append(key, make());
    }
    bool erase(std::string_view key) { return pop(key).has_value(); }
    // Removes the key and returns its value, if there is one.
    std::optional<Value> pop(std::string_view key) {
        const auto found = places_.find(key);
        std::optional<Value> value;
        if (found != places_.end()) {
            const auto entry = found->second;
            value = std::move(entry->second);
            places_.erase(found);
            entries_.erase(entry);
        }
        return value;
    }
    void erase_first() { erase(entries_.front().first); }
    // Erases every entry for which `is_over` is true.
    template <typename Test>
    void erase_if(Test is_over) {
        for (auto next = entries_.begin(); next != entries_.end();) {
            const auto entry = next++;
            if (is_over(entry->second)) {
                erase(entry->first);
            }
        }
    }
    // Makes the key the last one, and returns its value; nullptr: there is no such key.
    Value* move_last(std::string_view key) {
        const auto found = places_.find(key);
        if (found == places_.end()) {
            return nullptr;
        }
        entries_.splice(entries_.end(), entries_, found->second);
        return &found->second->second;
    }
    const auto& first() const { return entries_.front(); }
    auto begin() { return entries_.begin(); }
    auto end() { return entries_.end(); }
    auto begin() const { return entries_.begin(); }
    auto end() const { return entries_.end(); }

private:
    Value& append(std::string_view key, Value value) {
        const auto entry = entries_.emplace(entries_.end(), key, std::move(value));
        places_.emplace(entry->first, entry);
        return entry->second;
    }

    Entries entries_;
    std::unordered_map<std::string_view, typename Entries::iterator, TextHash> places_;
};

}  // namespace kv
