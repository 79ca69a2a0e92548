// A map from text to values that keeps the order in which keys came, as Python's dictionaries do: checkpoints write it.
#pragma once

#include <cstddef>
#include <cstring>
#include <list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "chain_tree.hpp"

namespace kv {

// Seeded, so that clients cannot choose names that collide.
struct TextHash {
    u64 seed = drawn_seed();
    std::size_t operator()(std::string_view text) const {
        u64 value = seed ^ text.size();
        while (!text.empty()) {
            u64 word = 0;
            const std::size_t some = text.size() < sizeof word ? text.size() : sizeof word;
            std::memcpy(&word, text.data(), some);
            value = mixed(value ^ word);
            text.remove_prefix(some);
        }
        return static_cast<std::size_t>(value);
    }
};

template <typename Value>
class OrderedMap {
public:
    using Entry = std::pair<const std::string, Value>;
    using Place = typename std::list<Entry>::iterator;

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
        if (Value* const known = find(key)) {
            *known = std::move(value);
            return *known;
        }
        entries_.emplace_back(std::string(key), std::move(value));
        const Place made = std::prev(entries_.end());
        places_.emplace(made->first, made);
        return made->second;
    }
    bool erase(std::string_view key) {
        const auto found = places_.find(key);
        if (found == places_.end()) {
            return false;
        }
        const Place place = found->second;
        places_.erase(found);
        entries_.erase(place);
        return true;
    }
    // Removes the key and returns its value; `none` if there is no such key.
    Value pop(std::string_view key, Value none) {
        if (Value* const known = find(key)) {
            none = std::move(*known);
            erase(key);
        }
        return none;
    }
    void erase_first() { erase(std::string(entries_.front().first)); }
    // Erases every entry for which `is_over` is true.
    template <typename Test>
    void erase_if(Test is_over) {
        for (Place place = entries_.begin(); place != entries_.end();) {
            const Place next = std::next(place);
            if (is_over(place->first, place->second)) {
                places_.erase(place->first);
                entries_.erase(place);
            }
            place = next;
        }
    }
    // Makes the key the last one.
    void move_last(std::string_view key) {
        const auto found = places_.find(key);
        if (found != places_.end()) {
            entries_.splice(entries_.end(), entries_, found->second);
        }
    }
    const Entry& first() const { return entries_.front(); }
    auto begin() { return entries_.begin(); }
    auto end() { return entries_.end(); }
    auto begin() const { return entries_.begin(); }
    auto end() const { return entries_.end(); }

private:
    std::list<Entry> entries_;
    std::unordered_map<std::string_view, Place, TextHash> places_;
};

}  // namespace kv
