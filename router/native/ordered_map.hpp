// A map from text to values that keeps the order in which keys came, as Python's dictionaries do: checkpoints write it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <list>
#include <optional>
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

// Memory of an entry that was erased serves the next one: decisions come and go all the time.
template <typename Value>
class OrderedMap {
public:
    OrderedMap() = default;
    OrderedMap(const OrderedMap&) = delete;
    OrderedMap& operator=(const OrderedMap&) = delete;

    std::size_t size() const { return nodes_.size(); }
    bool empty() const { return nodes_.empty(); }
    Value* find(std::string_view key) {
        Node* const node = node_of(key, hash_(key));
        return node == nullptr ? nullptr : &*node->value;
    }
    const Value* find(std::string_view key) const { return const_cast<OrderedMap*>(this)->find(key); }
    // Sets the key's value; a new key is the last one. The reference is valid until the key is erased.
    Value& put(std::string_view key, Value value) {
        const std::size_t hash = hash_(key);
        Node* const known = node_of(key, hash);
        Node& node = known == nullptr ? add_node(key, hash) : *known;
        node.value = std::move(value);
        return *node.value;
    }
    // Adds what `make` returns as the key's value, at the end; nullptr: the key is there.
    template <typename Make>
    Value* add(std::string_view key, Make make) {
        const std::size_t hash = hash_(key);
        if (node_of(key, hash) != nullptr) {
            return nullptr;
        }
        Value made = make();
        return &add_node(key, hash).value.emplace(std::move(made));
    }
    bool erase(std::string_view key) { return pop(key).has_value(); }
    // Removes the key and returns its value, if there is one.
    std::optional<Value> pop(std::string_view key) {
        Node* const node = node_of(key, hash_(key));
        std::optional<Value> value;
        if (node != nullptr) {
            value = std::move(node->value);
            erase(*node);
        }
        return value;
    }
    void erase_first() { erase(nodes_.front()); }
    // Erases every entry for which `is_over` is true.
    template <typename Test>
    void erase_if(Test is_over) {
        for (auto place = nodes_.begin(); place != nodes_.end();) {
            Node& node = *place++;
            if (is_over(node.key, *node.value)) {
                erase(node);
            }
        }
    }
    // Makes the key the last one, and returns its value; nullptr: there is no such key.
    Value* move_last(std::string_view key) {
        Node* const node = node_of(key, hash_(key));
        if (node == nullptr) {
            return nullptr;
        }
        nodes_.splice(nodes_.end(), nodes_, node->place);
        return &*node->value;
    }
    auto first() const { return *begin(); }
    auto begin() { return Entries<typename Nodes::iterator, Value>{nodes_.begin()}; }
    auto end() { return Entries<typename Nodes::iterator, Value>{nodes_.end()}; }
    auto begin() const { return Entries<typename Nodes::const_iterator, const Value>{nodes_.begin()}; }
    auto end() const { return Entries<typename Nodes::const_iterator, const Value>{nodes_.end()}; }

private:
    struct Node;
    using Nodes = std::list<Node>;
    // A node is in the order and in the chain of its bucket, or is spare and has no value.
    struct Node {
        std::string key;
        std::optional<Value> value;
        std::size_t hash = 0;
        Node* next = nullptr;  // of its bucket
        typename Nodes::iterator place;
    };
    // Goes over keys and values in place of nodes.
    template <typename Iterator, typename Of>
    struct Entries {
        using iterator_category = std::input_iterator_tag;
        using value_type = std::pair<const std::string&, Of&>;
        using difference_type = std::ptrdiff_t;
        using reference = value_type;
        using pointer = void;

        reference operator*() const { return {at->key, *at->value}; }
        Entries& operator++() {
            ++at;
            return *this;
        }
        Entries operator++(int) { return Entries{at++}; }
        bool operator==(const Entries& other) const { return at == other.at; }
        bool operator!=(const Entries& other) const { return at != other.at; }

        Iterator at;
    };
    static constexpr std::size_t kSpareMax = 1024;

    Node*& bucket(std::size_t hash) { return buckets_[hash & (buckets_.size() - 1)]; }
    Node* node_of(std::string_view key, std::size_t hash) {
        Node* node = buckets_.empty() ? nullptr : bucket(hash);
        while (node != nullptr && (node->hash != hash || node->key != key)) {
            node = node->next;
        }
        return node;
    }
    Node& add_node(std::string_view key, std::size_t hash) {
        if (nodes_.size() >= buckets_.size()) {
            grow();
        }
        if (spare_.empty()) {
            spare_.emplace_front();
        }
        nodes_.splice(nodes_.end(), spare_, spare_.begin());
        Node& made = nodes_.back();
        made.key.assign(key);
        made.hash = hash;
        made.place = std::prev(nodes_.end());
        link(made);
        return made;
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
        node.value.reset();
        spare_.splice(spare_.begin(), nodes_, node.place);
        if (spare_.size() > kSpareMax) {
            spare_.pop_back();
        }
    }
    void grow() {
        constexpr std::size_t kBucketsMin = 16;
        buckets_.assign(std::max(kBucketsMin, 2 * buckets_.size()), nullptr);
        for (Node& node : nodes_) {
            link(node);
        }
    }

    TextHash hash_;
    Nodes nodes_, spare_;
    std::vector<Node*> buckets_;  // a power of two; there are not more nodes
};

}  // namespace kv
