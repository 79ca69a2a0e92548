// A map from text to values that keeps the order in which keys came, as Python's dictionaries do: checkpoints write it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "chain_tree.hpp"

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
public:
    using Entry = std::pair<const std::string, Value>;

    OrderedMap() = default;
    OrderedMap(const OrderedMap&) = delete;
    OrderedMap& operator=(const OrderedMap&) = delete;

    std::size_t size() const { return nodes_.size(); }
    bool empty() const { return nodes_.empty(); }
    Value* find(std::string_view key) {
        Node* const node = node_of(key, hash_(key));
        return node == nullptr ? nullptr : &node->entry.second;
    }
    const Value* find(std::string_view key) const { return const_cast<OrderedMap*>(this)->find(key); }
    // Sets the key's value; a new key is the last one. The reference is valid until the key is erased.
    Value& put(std::string_view key, Value value) {
        const std::size_t hash = hash_(key);
        if (Node* const known = node_of(key, hash)) {
            known->entry.second = std::move(value);
            return known->entry.second;
        }
        if (nodes_.size() >= buckets_.size()) {
            grow();
        }
        nodes_.push_back(Node{Entry(std::string(key), std::move(value)), hash, nullptr, {}});
        Node& made = nodes_.back();
        made.place = std::prev(nodes_.end());
        link(made);
        return made.entry.second;
    }
    bool erase(std::string_view key) {
        Node* const node = node_of(key, hash_(key));
        if (node != nullptr) {
            erase(*node);
        }
        return node != nullptr;
    }
    // Removes the key and returns its value; `none` if there is no such key.
    Value pop(std::string_view key, Value none) {
        if (Node* const node = node_of(key, hash_(key))) {
            none = std::move(node->entry.second);
            erase(*node);
        }
        return none;
    }
    void erase_first() { erase(nodes_.front()); }
    // Erases every entry for which `is_over` is true.
    template <typename Test>
    void erase_if(Test is_over) {
        for (auto place = nodes_.begin(); place != nodes_.end();) {
            Node& node = *place++;
            if (is_over(node.entry.first, node.entry.second)) {
                erase(node);
            }
        }
    }
    // Makes the key the last one.
    void move_last(std::string_view key) {
        if (Node* const node = node_of(key, hash_(key))) {
            nodes_.splice(nodes_.end(), nodes_, node->place);
        }
    }
    const Entry& first() const { return nodes_.front().entry; }
    auto begin() { return Entries<typename Nodes::iterator>{nodes_.begin()}; }
    auto end() { return Entries<typename Nodes::iterator>{nodes_.end()}; }
    auto begin() const { return Entries<typename Nodes::const_iterator>{nodes_.begin()}; }
    auto end() const { return Entries<typename Nodes::const_iterator>{nodes_.end()}; }

private:
    struct Node;
    using Nodes = std::list<Node>;
    // An entry is one piece of memory: it is in the order and in the chain of its bucket.
    struct Node {
        Entry entry;
        std::size_t hash;
        Node* next;  // of its bucket
        typename Nodes::iterator place;
    };
    // Goes over entries in place of nodes.
    template <typename Iterator>
    struct Entries {
        using iterator_category = std::forward_iterator_tag;
        using value_type = Entry;
        using difference_type = std::ptrdiff_t;
        using reference = decltype((std::declval<Iterator>()->entry));
        using pointer = std::add_pointer_t<reference>;

        reference operator*() const { return at->entry; }
        Entries& operator++() {
            ++at;
            return *this;
        }
        Entries operator++(int) { return Entries{at++}; }
        bool operator==(const Entries& other) const { return at == other.at; }
        bool operator!=(const Entries& other) const { return at != other.at; }

        Iterator at;
    };

    Node*& bucket(std::size_t hash) { return buckets_[hash & (buckets_.size() - 1)]; }
    Node* node_of(std::string_view key, std::size_t hash) {
        Node* node = buckets_.empty() ? nullptr : bucket(hash);
        while (node != nullptr && (node->hash != hash || node->entry.first != key)) {
            node = node->next;
        }
        return node;
    }
    void link(Node& node) {
        node.next = bucket(node.hash);
        bucket(node.hash) = &node;
    }
    void erase(Node& node) {
        Node** at = &bucket(node.hash);
        while (*at != &node) {
            at = &(*at)->next;
        }
        *at = node.next;
        nodes_.erase(node.place);
    }
    void grow() {
        constexpr std::size_t kBucketsMin = 16;
        buckets_.assign(std::max(kBucketsMin, 2 * buckets_.size()), nullptr);
        for (Node& node : nodes_) {
            link(node);
        }
    }

    TextHash hash_;
    Nodes nodes_;
    std::vector<Node*> buckets_;  // a power of two; there are not more nodes
};

}  // namespace kv
